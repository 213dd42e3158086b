// Anthropic's SDK: /v1/messages.

import Anthropic from "@anthropic-ai/sdk";
import { ask, called, capital, check, city, isCapital, model, root, run, streamed } from "./steps.mjs";

const client = new Anthropic({ baseURL: root, apiKey: "none" });
const fields = { model, messages: ask, temperature: 0, max_tokens: 64 };

await run({
  async hello() {
    const message = await client.messages.create(fields);
    const count = await client.messages.countTokens({ model, messages: ask });
    const { input_tokens, cache_read_input_tokens } = message.usage;
    check(count.input_tokens === input_tokens + cache_read_input_tokens, count);
    return check(message.content[0].text, message.content[0].text);
  },
  async streaming() {
    const pieces = [];
    const stream = client.messages.stream(fields).on("text", (text) => pieces.push(text));
    const last = await stream.finalMessage();
    check(last.content[0].text === pieces.join(""), last);
    return streamed(pieces);
  },
  async tools() {
    const message = await client.messages.create({
      ...fields,
      tools: [{ name: "get_weather", input_schema: city }],
      tool_choice: { type: "tool", name: "get_weather" },
    });
    check(message.stop_reason === "tool_use", message);
    const [use] = message.content.filter((block) => block.type === "tool_use");
    return called(use.name, use.input);
  },
  async structured() {
    const format = { type: "json_schema", schema: capital };
    const message = await client.messages.create({ ...fields, output_config: { format } });
    check(isCapital(JSON.parse(message.content[0].text)), message);
    return message.content[0].text;
  },
});
