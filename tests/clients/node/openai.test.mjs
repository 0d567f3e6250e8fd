// OpenAI's client for Node, unmodified.
import assert from 'node:assert/strict';
import { test } from 'node:test';

import OpenAI from 'openai';
import { zodResponseFormat } from 'openai/helpers/zod';

import { ask, chat, embedder, model, Report, reportSchema } from './questions.mjs';

const client = new OpenAI();
const tool = {
  type: 'function',
  function: { name: 'report', description: 'Report.', parameters: reportSchema, strict: true },
};

test('models are listed and found', async () => {
  const names = [];
  for await (const entry of client.models.list()) names.push(entry.id);
  assert.ok(names.includes(model) && names.includes(embedder));
  assert.equal((await client.models.retrieve(model)).id, model);
});

test('a chat is answered', async () => {
  const answer = await client.chat.completions.create({
    model,
    messages: [{ role: 'developer', content: 'You write Python.' }, ...chat],
    temperature: 0,
    max_completion_tokens: 16,
  });
  const [choice] = answer.choices;
  assert.equal(choice.message.role, 'assistant');
  assert.ok(choice.message.content.length > 0);
  assert.ok(['stop', 'length'].includes(choice.finish_reason));
  assert.equal(answer.usage.total_tokens, answer.usage.prompt_tokens + answer.usage.completion_tokens);
  assert.ok(answer._request_id);
});

test('a stream comes in pieces, with its usage last when asked for', async () => {
  const stream = await client.chat.completions.create({
    model,
    messages: chat,
    temperature: 0,
    max_completion_tokens: 16,
    stream: true,
    stream_options: { include_usage: true },
  });
  const chunks = [];
  for await (const chunk of stream) chunks.push(chunk);
  assert.ok(chunks.length > 4);
  assert.deepEqual(chunks.at(-1).choices, []);
  assert.ok(chunks.at(-1).usage.completion_tokens > 0);
  assert.ok(chunks.slice(0, -1).every((chunk) => !chunk.usage));
});

test('the stream helper collects an answer', async () => {
  const stream = client.chat.completions.stream({ model, messages: chat, temperature: 0, stop: '\n' });
  let said = '';
  stream.on('content', (piece) => (said += piece));
  const final = await stream.finalChatCompletion();
  assert.equal(final.choices[0].message.content, said);
});

test('a schema is parsed into an object', async () => {
  const answer = await client.chat.completions.parse({
    model,
    messages: chat,
    temperature: 0,
    max_completion_tokens: 128,
    response_format: zodResponseFormat(Report, 'report'),
  });
  Report.parse(answer.choices[0].message.parsed);
});

test('a tool is called when it must be, whole and streamed', async () => {
  const asked = {
    model,
    messages: chat,
    temperature: 0,
    max_completion_tokens: 160,
    tools: [tool],
    tool_choice: { type: 'function', function: { name: 'report' } },
  };
  const answer = await client.chat.completions.create(asked);
  const [call] = answer.choices[0].message.tool_calls;
  assert.equal(call.function.name, 'report');
  Report.parse(JSON.parse(call.function.arguments));
  const streamed = await client.chat.completions.stream(asked).finalChatCompletion();
  Report.parse(JSON.parse(streamed.choices[0].message.tool_calls[0].function.arguments));
});

test('texts are embedded', async () => {
  const answer = await client.embeddings.create({ model: embedder, input: ['one text', 'another'] });
  assert.equal(answer.data.length, 2);
  assert.equal(answer.data[0].embedding.length, answer.data[1].embedding.length);
  assert.ok(answer.data[0].embedding.every(Number.isFinite));
});

test('a response is given, whole and streamed', async () => {
  const asked = { model, input: ask, temperature: 0, max_output_tokens: 16, store: false };
  const answer = await client.responses.create(asked);
  assert.ok(answer.output_text.length > 0);
  const kinds = [];
  for await (const event of await client.responses.create({ ...asked, stream: true })) kinds.push(event.type);
  assert.equal(kinds[0], 'response.created');
  assert.ok(kinds.includes('response.output_text.delta'));
  assert.ok(['response.completed', 'response.incomplete'].includes(kinds.at(-1)));
});

test('errors have the classes applications catch', async () => {
  const refused = (error, promise) => assert.rejects(promise, error);
  const asked = { model, messages: chat, max_completion_tokens: 1 };
  await refused(OpenAI.AuthenticationError, client.withOptions({ apiKey: 'sk-wrong' }).chat.completions.create(asked));
  await refused(OpenAI.NotFoundError, client.chat.completions.create({ ...asked, model: 'gpt-9' }));
  await refused(OpenAI.BadRequestError, client.chat.completions.create({ ...asked, temperature: 'hot' }));
  await assert.rejects(
    client.chat.completions.create({ ...asked, messages: [{ role: 'user', content: 'word '.repeat(9000) }] }),
    (error) => error instanceof OpenAI.BadRequestError && error.code === 'context_length_exceeded',
  );
});

test('a client that will not wait gives up', async () => {
  const long = { model, messages: chat, max_completion_tokens: 1500, ignore_eos: true };
  await assert.rejects(
    client.chat.completions.create(long, { timeout: 1000, maxRetries: 0 }),
    OpenAI.APIConnectionTimeoutError,
  );
});

test('a stream may be left in the middle', async () => {
  const long = { model, messages: chat, max_completion_tokens: 1500, ignore_eos: true, stream: true };
  const stream = await client.chat.completions.create(long);
  let count = 0;
  for await (const _chunk of stream) if (++count === 5) break;
  assert.equal(count, 5);
  const after = await client.chat.completions.create({ model, messages: chat, max_completion_tokens: 1 });
  assert.equal(after.usage.completion_tokens, 1);
});
