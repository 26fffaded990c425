// What the gateway is asked, and what can go wrong with it.

const TOKEN = "twinlens-token";

export const token = {
  get: () => sessionStorage.getItem(TOKEN) ?? "",
  set: (value) => (value ? sessionStorage.setItem(TOKEN, value) : sessionStorage.removeItem(TOKEN)),
};

// Why a request failed: the gateway's message and stable code, and what to do about it.
export class Failure extends Error {
  constructor(message, { code = "", param = "", status = 0 } = {}) {
    super(message);
    Object.assign(this, { code, param, status });
  }

  get advice() {
    if (ADVICE[this.code]) return ADVICE[this.code];
    if (this.status === 401) return "Put the gateway’s token into the settings.";
    if (this.status === 429) return "There is much to do just now. Try again in a moment.";
    if (this.status === 413) return "Send less, or a smaller file.";
    if (this.status >= 500) return "Try again. If it stays so, the services’ logs say more.";
    if (this.param.includes("content[")) return "Try another file, or save this one in another format.";
    return "";
  }
}

const ADVICE = {
  OFFLINE: "Is the gateway running, and does this machine reach it? Then try again.",
  BROKE_OFF: "Try again: what was computed so far is remembered.",
  STREAM_INTERRUPTED: "Try again: what was computed so far is remembered.",
  NO_LLM_SERVICE: "An LLM service has to be started, or is still loading its model. Try again in a moment.",
  UNKNOWN_MODEL: "Choose another model at the top of the page.",
  context_length_exceeded: "Begin a new chat, or send fewer or smaller pictures.",
};

function headers() {
  return token.get() ? { authorization: `Bearer ${token.get()}` } : {};
}

async function answered(path, options) {
  let response;
  try {
    response = await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Failure("the gateway cannot be reached", { code: "OFFLINE" });
  }
  if (response.ok) return response;
  const said = await response.json().catch(() => null);
  throw failure(said?.error, response.status);
}

// A message begins with the field at fault, which the page shows elsewhere.
function failure(error, status = 0) {
  const [message, param] = [error?.message ?? `the gateway answered with status ${status}`, error?.param ?? ""];
  const field = `${param}: `;
  return new Failure(param && message.startsWith(field) ? message.slice(field.length) : message, {
    code: error?.code ?? "",
    param,
    status,
  });
}

export async function getJson(path, signal) {
  return (await answered(path, { headers: headers(), signal })).json();
}

// A body in which blobs stand for texts: they go into it as they are, so that files of many megabytes are neither copied nor
// looked through while somebody waits.
function packed(body) {
  const blobs = [];
  const mark = `blob-${Math.random()}`;
  const json = JSON.stringify(body, (_, value) => (value instanceof Blob ? blobs.push(value) && mark : value));
  const parts = json.split(mark).flatMap((text, index) => (index ? [blobs[index - 1], text] : [text]));
  return new Blob(parts, { type: "application/json" });
}

// The chunks of a chat's stream. Throws Failure where it fails, at the beginning or later, or ends before its end.
export async function* chat(body, signal) {
  const options = {
    method: "POST",
    headers: headers(),
    body: packed(body),
    signal,
  };
  const response = await answered("v1/chat/completions", options);
  for await (const data of events(response.body)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw failure(chunk.error);
    yield chunk;
  }
  throw new Failure("the answer broke off", { code: "BROKE_OFF" });
}

// The data of server-sent events, as they come.
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const parts = (text + value).split("\n\n");
      text = parts.pop();
      for (const part of parts) {
        const lines = part.split("\n").filter((line) => line.startsWith("data: "));
        if (lines.length) yield lines.map((line) => line.slice(6)).join("\n");
      }
    }
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Failure("the answer broke off", { code: "BROKE_OFF" });
  } finally {
    reader.cancel().catch(() => {});
  }
}
