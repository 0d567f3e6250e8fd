// What the clients ask: things a very small model answers in few tokens, made to by a grammar if need be.
import { z } from 'zod';

export const model = process.env.CHAT_MODEL;
export const embedder = process.env.EMBEDDING_MODEL;
export const ask = 'Write a Python function `read_lines`.';
export const chat = [{ role: 'user', content: ask }];

// Every answer to it is short, whatever a model prefers.
export const Report = z.object({
  language: z.enum(['python', 'rust']),
  size: z.enum(['small', 'large']),
  tested: z.boolean(),
});
export const reportSchema = {
  type: 'object',
  properties: {
    language: { type: 'string', enum: ['python', 'rust'] },
    size: { type: 'string', enum: ['small', 'large'] },
    tested: { type: 'boolean' },
  },
  required: ['language', 'size', 'tested'],
  additionalProperties: false,
};
