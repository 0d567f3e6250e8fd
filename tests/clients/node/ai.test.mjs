// The Vercel AI SDK, unmodified, with both of its providers for this API.
import assert from 'node:assert/strict';
import { test } from 'node:test';

import { createOpenAI } from '@ai-sdk/openai';
import { createOpenAICompatible } from '@ai-sdk/openai-compatible';
import { APICallError, embedMany, generateText, isStepCount, Output, streamText, tool } from 'ai';

import { ask, embedder, model, Report } from './questions.mjs';

const baseURL = process.env.OPENAI_BASE_URL;
const apiKey = process.env.OPENAI_API_KEY;
const openai = createOpenAI({ baseURL, apiKey });
const settings = { name: 'appliance', baseURL, apiKey, includeUsage: true, supportsStructuredOutputs: true };
const compatible = createOpenAICompatible(settings);
const chatModels = { 'openai.chat': openai.chat(model), 'openai-compatible': compatible(model) };

// The model may end its answer before a client leaves it, unless it is told not to.
const endless = (url, { body, ...init }) =>
  fetch(url, { ...init, body: JSON.stringify({ ...JSON.parse(body), ignore_eos: true }) });
const endlessModels = {
  'openai.chat': createOpenAI({ baseURL, apiKey, fetch: endless }).chat(model),
  'openai-compatible': createOpenAICompatible({ ...settings, fetch: endless })(model),
};

for (const [name, chatModel] of Object.entries(chatModels)) {
  const asked = { model: chatModel, prompt: ask, temperature: 0, maxOutputTokens: 16, maxRetries: 0 };

  test(`${name}: a text is generated`, async () => {
    const answer = await generateText({ ...asked, instructions: 'You write Python.' });
    assert.ok(answer.text.length > 0);
    assert.ok(answer.usage.inputTokens > 0 && answer.usage.outputTokens > 0);
    assert.ok(['stop', 'length'].includes(answer.finishReason));
  });

  test(`${name}: a text is streamed, with its usage`, async () => {
    const answer = streamText(asked);
    const pieces = [];
    for await (const piece of answer.textStream) pieces.push(piece);
    assert.ok(pieces.length > 2);
    assert.ok((await answer.usage).outputTokens > 0);
  });

  test(`${name}: an object keeps to its schema, whole and streamed`, async () => {
    const wanted = { ...asked, maxOutputTokens: 128, output: Output.object({ schema: Report, name: 'report' }) };
    Report.parse((await generateText(wanted)).output);
    Report.parse(await streamText(wanted).output);
  });

  test(`${name}: a tool is called, run, and its result read`, async () => {
    const runs = [];
    const report = tool({
      description: 'Report what was written.',
      inputSchema: Report,
      strict: true,
      execute: (input) => {
        runs.push(Report.parse(input));
        return 'noted';
      },
    });
    const answer = await generateText({
      ...asked,
      maxOutputTokens: 160,
      tools: { report },
      toolChoice: { type: 'tool', toolName: 'report' },
      stopWhen: isStepCount(2),
      prepareStep: ({ stepNumber }) => (stepNumber === 0 ? {} : { toolChoice: 'none' }),
    });
    assert.equal(runs.length, 1);
    assert.equal(answer.steps.length, 2);
  });

  test(`${name}: a tool call is streamed`, async () => {
    const answer = streamText({
      ...asked,
      maxOutputTokens: 160,
      tools: { report: tool({ inputSchema: Report, strict: true }) },
      toolChoice: { type: 'tool', toolName: 'report' },
    });
    const [call] = await answer.toolCalls;
    assert.equal(call.toolName, 'report');
    Report.parse(call.input);
  });

  test(`${name}: errors say whether to try again`, async () => {
    const wrong = { 'openai.chat': openai.chat('gpt-9'), 'openai-compatible': compatible('gpt-9') }[name];
    await assert.rejects(generateText({ ...asked, model: wrong }), (error) => {
      assert.ok(APICallError.isInstance(error), String(error));
      assert.equal(error.statusCode, 404);
      assert.equal(error.isRetryable, false);
      assert.match(error.message, /gpt-9/);
      return true;
    });
  });

  test(`${name}: a stream may be left in the middle`, async () => {
    const leaving = new AbortController();
    const long = { ...asked, model: endlessModels[name], maxOutputTokens: 1500 };
    const answer = streamText({ ...long, abortSignal: leaving.signal });
    let count = 0;
    for await (const _piece of answer.textStream) if (++count === 3) leaving.abort();
    assert.ok(count >= 3);
  });
}

test('openai: the responses endpoint, whole and streamed', async () => {
  const asked = { model: openai(model), prompt: ask, temperature: 0, maxOutputTokens: 16, maxRetries: 0 };
  const answer = await generateText(asked);
  assert.ok(answer.text.length > 0);
  assert.ok(answer.usage.outputTokens > 0);
  let said = '';
  for await (const piece of streamText(asked).textStream) said += piece;
  assert.ok(said.length > 0);
});

test('texts are embedded', async () => {
  for (const provider of [openai, compatible]) {
    const { embeddings } = await embedMany({ model: provider.embeddingModel(embedder), values: ['one', 'two'] });
    assert.equal(embeddings.length, 2);
    assert.equal(embeddings[0].length, embeddings[1].length);
  }
});
