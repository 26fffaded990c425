// Asks about a picture and streams the answer: over gRPC, or through the gateway with --gateway.
//
//   npm install
//   npm run --silent ask -- [--llm URL | --gateway URL] PICTURE QUESTION
import { readFileSync } from "node:fs";
import { parseArgs } from "node:util";
import { createClient } from "@connectrpc/connect";
import { createGrpcTransport } from "@connectrpc/connect-node";
import OpenAI from "openai";
import { LlmService } from "./gen/twinlens/v1/llm_pb";
import { Modality } from "./gen/twinlens/v1/media_pb";

/** Streams the answer over gRPC. */
async function* askService(url: string, picture: Uint8Array, question: string): AsyncGenerator<string> {
  const service = createClient(LlmService, createGrpcTransport({ baseUrl: url }));
  const media = { modality: Modality.IMAGE, source: { case: "data" as const, value: picture } };
  const parts = [
    { part: { case: "media" as const, value: media } },
    { part: { case: "text" as const, value: question } },
  ];
  const sampling = { temperature: 0, maxTokens: 256 };
  const chat = { messages: [{ role: "user", parts }] };
  for await (const { event } of service.generate({ input: { case: "chat", value: chat }, sampling })) {
    if (event.case === "delta") yield event.value.text;
  }
}

/** Streams the same answer by OpenAI's API. */
async function* askGateway(url: string, picture: Uint8Array, question: string): AsyncGenerator<string> {
  const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: process.env.TWINLENS_TOKEN ?? "none" });
  const [model] = (await client.models.list()).data;
  const address = `data:image/png;base64,${Buffer.from(picture).toString("base64")}`;
  const content = [
    { type: "image_url" as const, image_url: { url: address } },
    { type: "text" as const, text: question },
  ];
  const stream = await client.chat.completions.create({
    model: model.id,
    messages: [{ role: "user", content }],
    temperature: 0,
    max_tokens: 256,
    stream: true,
  });
  for await (const chunk of stream) yield chunk.choices[0]?.delta.content ?? "";
}

const { values, positionals } = parseArgs({
  options: { llm: { type: "string", default: "http://127.0.0.1:7002" }, gateway: { type: "string" } },
  allowPositionals: true,
});
if (positionals.length !== 2) {
  console.error("usage: npm run ask -- [--llm URL | --gateway URL] PICTURE QUESTION");
  process.exit(2);
}
const [file, question] = positionals;
const picture = new Uint8Array(readFileSync(file));
const answer = values.gateway
  ? askGateway(values.gateway, picture, question)
  : askService(values.llm, picture, question);
for await (const text of answer) process.stdout.write(text);
process.stdout.write("\n");
