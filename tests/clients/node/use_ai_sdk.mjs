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
const asked = { prompt: question, temperature: 0, maxOutputTokens: 64, maxRetries: 0 };

async function each(ask) {
  const said = [];
  for (const one of models) said.push(await ask({ ...asked, model: one }));
  return said;
}

await run({
  async hello() {
    const said = await each(async (options) => (await generateText(options)).text);
    check(said[0] && said[0] === said[1], said);
    return said[0];
  },
  async streaming() {
    const said = await each(async (options) => {
      const result = streamText({ ...options, onError: ({ error }) => { throw error; } });
      const pieces = [];
      for await (const piece of result.textStream) pieces.push(piece);
      check((await result.usage).outputTokens > 0, await result.usage);
      return streamed(pieces);
    });
    return said[0];
  },
  async tools() {
    const weather = tool({ description: "The weather.", inputSchema: jsonSchema(city) });
    const said = await each(async (options) => {
      const result = await generateText({
        ...options, tools: { get_weather: weather }, toolChoice: "required",
      });
      const [call] = result.toolCalls;
      return called(call.toolName, call.input);
    });
    return said[0];
  },
  async structured() {
    const said = await each(async (options) => {
      const output = Output.object({ schema: jsonSchema(capital) });
      const found = (await generateText({ ...options, output })).output;
      check(isCapital(found), found);
      return JSON.stringify(found);
    });
    return said[0];
  },
});
