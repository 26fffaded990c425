// Asks a gateway with npm's openai, unchanged. Reads what to ask from standard input, and prints what came, by case.
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";

const given = JSON.parse(readFileSync(0, "utf8"));
const require = createRequire(`${given.packages}/`);
const OpenAI = require("openai");
const { standardResponseFormat } = require("openai/helpers/standard-schema");

const open = (baseURL, options) => new OpenAI({ baseURL, apiKey: "none", maxRetries: 0, timeout: 60_000, ...options });
const real = open(given.real.url);
const scripted = open(given.scripted.url);

const ask = (content, fields) => ({
  model: given.real.model,
  messages: [{ role: "user", content }],
  temperature: 0,
  max_tokens: 8,
  ...fields,
});
const text = (words) => ({ type: "text", text: words });
const picture = [{ type: "image_url", image_url: { url: given.picture } }, text("What is it?")];
const video = [{ type: "video_url", video_url: { url: given.video } }, text("What happens?")];
const tools = [given.tool];
const weather = { model: "demo", messages: [{ role: "user", content: "Rome?" }], tools };
const [responseTool] = tools.map(({ type, function: of }) => ({ type, strict: null, ...of }));
const format = { type: "json_schema", json_schema: { name: "city", schema: given.schema, strict: true } };

// What a helper for schemas takes from any library that follows the standard.
const schema = {
  "~standard": {
    version: 1,
    vendor: "test",
    validate: (value) => ({ value }),
    jsonSchema: { input: () => given.schema },
  },
};

async function all(stream) {
  const events = [];
  for await (const event of stream) events.push(event);
  return events;
}

async function failure(promise) {
  try {
    await promise;
  } catch (error) {
    return { name: error.constructor.name, status: error.status, code: error.code, param: error.param };
  }
  return null;
}

const cases = {
  async picture() {
    const answer = await real.chat.completions.create(ask(picture));
    return [answer.choices[0].message.content, answer.choices[0].finish_reason, answer.usage.prompt_tokens];
  },
  async video() {
    const answer = await real.chat.completions.create(ask(video));
    return [answer.choices[0].message.content, answer.choices[0].finish_reason, answer.usage.prompt_tokens];
  },
  async stream() {
    const chunks = await all(
      await real.chat.completions.create(ask(picture, { stream: true, stream_options: { include_usage: true } })),
    );
    const last = chunks.pop();
    const words = chunks.map((chunk) => chunk.choices[0].delta.content ?? "").join("");
    return [words, chunks.at(-1).choices[0].finish_reason, last.usage.prompt_tokens];
  },
  async stream_helper() {
    const stream = real.chat.completions.stream(ask(picture));
    let words = "";
    stream.on("content", (delta) => (words += delta));
    const answer = await stream.finalChatCompletion();
    return [words, answer.choices[0].message.content];
  },
  async n() {
    const answer = await real.chat.completions.create(ask("Hello", { n: 3, temperature: 1.5, seed: 11 }));
    return answer.choices.map((choice) => choice.message.content);
  },
  async logprobs() {
    const answer = await real.chat.completions.create(ask("Hello", { logprobs: true, top_logprobs: 2 }));
    return answer.choices[0].logprobs.content.map((each) => [each.token, each.top_logprobs.length]);
  },
  async json_schema() {
    const answer = await real.chat.completions.create(ask("Hello", { max_tokens: 200, response_format: format }));
    return Object.keys(JSON.parse(answer.choices[0].message.content));
  },
  async parse() {
    const response_format = standardResponseFormat(schema, "city");
    const answer = await real.chat.completions.parse(ask("Hello", { max_tokens: 200, response_format }));
    return Object.keys(answer.choices[0].message.parsed);
  },
  async tools() {
    const { choices } = await scripted.chat.completions.create(weather);
    const { content, reasoning_content, tool_calls } = choices[0].message;
    return [content, reasoning_content, tool_calls[0].function, choices[0].finish_reason];
  },
  async tools_stream() {
    const call = { name: "", arguments: "" };
    let ending = null;
    for await (const chunk of await scripted.chat.completions.create({ ...weather, stream: true })) {
      for (const piece of chunk.choices[0].delta.tool_calls ?? []) {
        call.name += piece.function.name ?? "";
        call.arguments += piece.function.arguments ?? "";
      }
      ending = chunk.choices[0].finish_reason;
    }
    return [call, ending];
  },
  async arguments_stream() {
    const stream = scripted.chat.completions.stream({ ...weather, tool_choice: "required" });
    let pieces = "";
    stream.on("tool_calls.function.arguments.delta", (event) => (pieces += event.arguments_delta));
    const answer = await stream.finalChatCompletion();
    return [pieces, answer.choices[0].message.tool_calls[0].function.arguments];
  },
  async second_turn() {
    const { message } = (await scripted.chat.completions.create(weather)).choices[0];
    const result = { role: "tool", tool_call_id: message.tool_calls[0].id, content: "Sun." };
    const answer = await scripted.chat.completions.create({
      ...weather,
      messages: [...weather.messages, message, result],
    });
    return answer.choices[0].message.content;
  },
  async run_tools() {
    const asked = [];
    const of = { ...given.tool.function, parse: JSON.parse, function: ({ city }) => (asked.push(city), "Sun.") };
    const runner = scripted.chat.completions.runTools({ ...weather, tools: [{ type: "function", function: of }] });
    return [await runner.finalContent(), asked];
  },
  async responses() {
    const input = [
      {
        role: "user",
        content: [
          { type: "input_image", image_url: given.picture, detail: "auto" },
          { type: "input_text", text: "What is it?" },
        ],
      },
    ];
    const answer = await real.responses.create({
      model: given.real.model,
      input,
      temperature: 0,
      max_output_tokens: 8,
    });
    return [answer.output_text, answer.status, answer.usage.input_tokens];
  },
  async responses_stream() {
    const stream = scripted.responses.stream({ model: "demo", input: "Rome?", tools: [responseTool] });
    let pieces = "";
    stream.on("response.function_call_arguments.delta", (event) => (pieces += event.delta));
    const answer = await stream.finalResponse();
    return [answer.output_text, answer.output.map((item) => item.type), pieces];
  },
  async responses_parse() {
    const text = { format: { type: "json_schema", name: "city", schema: given.schema, strict: true } };
    return JSON.parse((await scripted.responses.create({ model: "demo", input: "Rome?", text })).output_text);
  },
  async abort() {
    const stream = await scripted.chat.completions.create({
      model: "demo",
      messages: [{ role: "user", content: "Slow" }],
      stream: true,
    });
    for await (const chunk of stream) {
      stream.controller.abort();
      return chunk.choices[0].delta.role;
    }
  },
  async timeout() {
    const slow = { model: "demo", messages: [{ role: "user", content: "Slow" }] };
    return (await failure(scripted.chat.completions.create(slow, { timeout: 300 }))).name;
  },
  async retry() {
    const busy = { model: "demo", messages: [{ role: "user", content: "Busy" }] };
    return (await scripted.chat.completions.create(busy, { maxRetries: 1 })).choices[0].message.content;
  },
  async no_retry() {
    const full = { model: "demo", messages: [{ role: "user", content: "Full" }] };
    return await failure(scripted.chat.completions.create(full));
  },
  async refusal() {
    return await failure(real.chat.completions.create(ask("Hello", { audio: { voice: "x", format: "wav" } })));
  },
  async models() {
    return (await all(await real.models.list())).map((model) => model.id);
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
