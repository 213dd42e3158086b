// OpenAI's SDK: chat and responses.

import OpenAI from "openai";
import { ask, called, capital, check, city, isCapital, model, question, run, streamed, url } from "./steps.mjs";

const client = new OpenAI({ baseURL: url, apiKey: "none" });
const fields = { model, messages: ask, temperature: 0 };
const format = { type: "json_schema", name: "capital", schema: capital, strict: true };
const tool = { type: "function", function: { name: "get_weather", parameters: city } };

await run({
  async hello() {
    const chat = await client.chat.completions.create(fields);
    const response = await client.responses.create({ model, input: question, temperature: 0 });
    check(response.output_text === chat.choices[0].message.content, response.output_text);
    return check(response.output_text, response.output_text);
  },
  async streaming() {
    const pieces = [];
    for await (const chunk of await client.chat.completions.create({ ...fields, stream: true }))
      pieces.push(chunk.choices[0]?.delta.content ?? "");
    const stream = client.responses.stream({ model, input: question, temperature: 0 });
    const last = await stream.finalResponse();
    check(last.output_text === pieces.join(""), last.output_text);
    return streamed(pieces);
  },
  async tools() {
    const chat = await client.chat.completions.create({
      ...fields, tools: [tool], tool_choice: "required",
    });
    const { name, arguments: given } = chat.choices[0].message.tool_calls[0].function;
    return called(name, given);
  },
  async structured() {
    const { type, ...json_schema } = format;
    const chat = await client.chat.completions.parse({
      ...fields, response_format: { type, json_schema },
    });
    const response = await client.responses.parse({
      model, input: question, temperature: 0, text: { format },
    });
    check(isCapital(response.output_parsed), response.output_parsed);
    const found = chat.choices[0].message.parsed;
    check(isCapital(found), found);
    return JSON.stringify(found);
  },
});
