// Asks a gateway with @anthropic-ai/sdk, unchanged. Reads what to ask from standard input, and prints what came, by case.
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";

const given = JSON.parse(readFileSync(0, "utf8"));
const require = createRequire(`${given.packages}/`);
const Anthropic = require("@anthropic-ai/sdk");

const open = (url) =>
  new Anthropic({ baseURL: url.replace(/\/v1$/, ""), apiKey: "none", maxRetries: 0, timeout: 60_000 });
const real = open(given.real.url);
const scripted = open(given.scripted.url);

const [, data] = given.picture.split(",");
const picture = [
  { type: "image", source: { type: "base64", media_type: "image/png", data } },
  { type: "text", text: "What is it?" },
];
const ask = { model: given.real.model, max_tokens: 8, messages: [{ role: "user", content: picture }], temperature: 0 };
const { name, description, parameters: input_schema } = given.tool.function;
const weather = {
  model: "demo",
  max_tokens: 99,
  messages: [{ role: "user", content: "Rome?" }],
  tools: [{ name, description, input_schema }],
};
const seen_in = (message) => message.content.map(({ id, ...block }) => block);

const cases = {
  async picture() {
    const { content, stop_reason, usage } = await real.messages.create(ask);
    return [content[0].text, stop_reason, usage.input_tokens + usage.cache_read_input_tokens];
  },
  async stream() {
    const stream = real.messages.stream(ask);
    let words = "";
    stream.on("text", (delta) => (words += delta));
    const { stop_reason, usage } = await stream.finalMessage();
    return [words, stop_reason, usage.input_tokens + usage.cache_read_input_tokens];
  },
  async count() {
    const { model, messages } = ask;
    return (await real.messages.countTokens({ model, messages })).input_tokens;
  },
  async tools() {
    return seen_in(await scripted.messages.create(weather));
  },
  async tools_stream() {
    return seen_in(await scripted.messages.stream(weather).finalMessage());
  },
  async second_turn() {
    const message = await scripted.messages.create(weather);
    const result = { type: "tool_result", tool_use_id: message.content.at(-1).id, content: "Sun." };
    const turns = [
      ...weather.messages,
      { role: "assistant", content: message.content },
      { role: "user", content: [result] },
    ];
    return (await scripted.messages.create({ ...weather, messages: turns })).content[0].text;
  },
  async abort() {
    const slow = { ...weather, messages: [{ role: "user", content: "Slow" }] };
    for await (const event of scripted.messages.stream(slow)) return event.type;
  },
  async refusal() {
    try {
      await scripted.messages.create({ ...weather, messages: [{ role: "user", content: "Full" }] });
    } catch (error) {
      return [error.constructor.name, error.status, error.error.error.type, error.error.error.details.error_code];
    }
  },
};

const seen = {};
for (const [name, run] of Object.entries(cases)) {
  try {
    seen[name] = await run();
  } catch (error) {
    seen[name] = `failed: ${error.stack}`;
  }
}
console.log(JSON.stringify(seen));
process.exit(0); // streams that were given up may hold it
