// The AI SDK, with its provider for compatible servers and with OpenAI's own (responses).

import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, jsonSchema, Output, streamText, tool } from "ai";
import { called, capital, check, city, isCapital, model, question, run, streamed, url } from "./steps.mjs";

const compatible = createOpenAICompatible({
  name: "foredraft", baseURL: url, apiKey: "none", includeUsage: true, supportsStructuredOutputs: true,
});
const openai = createOpenAI({ baseURL: url, apiKey: "none" });
const models = [compatible(model), openai.responses(model)];
const fields = { prompt: question, temperature: 0, maxOutputTokens: 64, maxRetries: 0 };

async function each(ask) {
  const results = [];
  for (const one of models) results.push(await ask({ ...fields, model: one }));
  return results;
}

await run({
  async hello() {
    const results = await each(async (options) => (await generateText(options)).text);
    check(results[0] && results[0] === results[1], results);
    return results[0];
  },
  async streaming() {
    const results = await each(async (options) => {
      const result = streamText({ ...options, onError: ({ error }) => { throw error; } });
      const pieces = [];
      for await (const piece of result.textStream) pieces.push(piece);
      check((await result.usage).outputTokens > 0, await result.usage);
      return streamed(pieces);
    });
    return results[0];
  },
  async tools() {
    const weather = tool({ description: "The weather.", inputSchema: jsonSchema(city) });
    const results = await each(async (options) => {
      const result = await generateText({
        ...options, tools: { get_weather: weather }, toolChoice: "required",
      });
      const [call] = result.toolCalls;
      return called(call.toolName, call.input);
    });
    return results[0];
  },
  async structured() {
    const results = await each(async (options) => {
      const output = Output.object({ schema: jsonSchema(capital) });
      const found = (await generateText({ ...options, output })).output;
      check(isCapital(found), found);
      return JSON.stringify(found);
    });
    return results[0];
  },
});
