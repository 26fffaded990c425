// Asks a gateway with Vercel's ai, unchanged. Reads what to ask from standard input, and prints what came, by case.
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";

const given = JSON.parse(readFileSync(0, "utf8"));
const require = createRequire(`${given.packages}/`);
const { Output, generateText, jsonSchema, stepCountIs, streamText, tool } = require("ai");
const { createOpenAI } = require("@ai-sdk/openai");
const { createOpenAICompatible } = require("@ai-sdk/openai-compatible");

const warnings = [];
globalThis.AI_SDK_LOG_WARNINGS = (told) => warnings.push(...told.warnings);

const chat = ({ url, model }) =>
  createOpenAICompatible({
    name: "gateway",
    baseURL: url,
    apiKey: "none",
    includeUsage: true,
    supportsStructuredOutputs: true,
  })(model);
const response = ({ url, model }) => createOpenAI({ baseURL: url, apiKey: "none" }).responses(model);
const models = { chat, response };
const stored = {
  chat: {},
  response: {
    openai: {
      store: false,
      forceReasoning: true,
      reasoningSummary: "auto",
      include: ["reasoning.encrypted_content"],
    },
  },
};

const picture = [
  { type: "image", image: given.picture.split(",")[1], mediaType: "image/png" },
  { type: "text", text: "What is it?" },
];
const ask = { messages: [{ role: "user", content: picture }], maxOutputTokens: 8, temperature: 0, maxRetries: 0 };
const asked = [];
const { description, parameters } = given.tool.function;
const weather = tool({
  description,
  inputSchema: jsonSchema(parameters),
  execute: ({ city }) => asked.push(city) && "Sun.",
});
const agent = { prompt: "Rome?", tools: { weather }, stopWhen: stepCountIs(3), maxRetries: 0 };

const cases = {};
for (const [name, open] of Object.entries(models)) {
  const [real, scripted, providerOptions] = [open(given.real), open(given.scripted), stored[name]];
  cases[`${name} picture`] = async () => {
    const { text, finishReason, usage } = await generateText({ ...ask, model: real });
    return [text, finishReason, usage.inputTokens];
  };
  cases[`${name} stream`] = async () => {
    const stream = streamText({ ...ask, model: real });
    let words = "";
    for await (const delta of stream.textStream) words += delta;
    return [words, await stream.finishReason, (await stream.usage).inputTokens];
  };
  cases[`${name} agent`] = async () => {
    const { text, steps } = await generateText({ ...agent, model: scripted, providerOptions });
    return [steps[0].reasoningText, steps[0].text, text, asked.splice(0)];
  };
  cases[`${name} agent_stream`] = async () => {
    const { text, steps } = streamText({ ...agent, model: scripted, providerOptions });
    const [first] = await steps;
    return [first.reasoningText, first.text, await text, asked.splice(0)];
  };
  cases[`${name} output`] = async () => {
    const output = Output.object({ schema: jsonSchema(given.schema) });
    return (await generateText({ prompt: "Rome?", output, model: scripted, maxRetries: 0 })).output;
  };
  cases[`${name} refusal`] = async () => {
    try {
      await generateText({ prompt: "Full", model: scripted, maxRetries: 0 });
    } catch (error) {
      return [error.statusCode, error.message, error.isRetryable];
    }
  };
}
cases.warnings = () => warnings;

const seen = {};
for (const [name, run] of Object.entries(cases)) {
  try {
    seen[name] = await run();
  } catch (error) {
    seen[name] = `failed: ${error.stack}`;
  }
}
console.log(JSON.stringify(seen));
process.exit(0);
