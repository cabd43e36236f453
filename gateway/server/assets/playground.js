// A chat with the model behind this gateway: streamed, with pictures, clips and tools.
// Words of the model reach the page as text only, never as markup; nothing is stored.
"use strict";

const byId = (id) => document.getElementById(id);
const log = byId("log");
// Words are put on the page that often: a fast stream must not keep it from hearing its user.
const SHOW_MS = 50;

// What the next request sends; a turn that fails is taken back.
let messages = [];
// Media of the message in the making: {part, file}.
let attached = [];
// Done when all files chosen so far have been read; a message waits for its media.
let reading = Promise.resolve();
let running = null;
// The model waits for the results of its calls.
let awaitsResults = false;

function element(name, text, className) {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  return made;
}

function headers() {
  const key = byId("key").value.trim();
  const sent = { "content-type": "application/json" };
  if (key) sent.authorization = `Bearer ${key}`;
  return sent;
}

// ---- readiness ----

async function askState() {
  const state = byId("state");
  try {
    const ready = await (await fetch("ready")).json();
    byId("model").textContent = ready.model;
    state.className = ready.ready ? "ready" : "missing";
    state.textContent = ready.ready
      ? `ready${ready.video ? "" : "; no clips: FFmpeg is missing"}`
      : `not ready: ${ready.missing.join("; ") || "no worker"}`;
  } catch {
    state.className = "missing";
    state.textContent = "the gateway does not answer";
  }
}

// ---- media ----

function dataUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}

function attach(files) {
  const chosen = [...files];
  reading = reading.then(() => readAll(chosen));
  return reading;
}

async function readAll(files) {
  for (const file of files) {
    const kind = file.type.split("/")[0];
    if (kind !== "image" && kind !== "video") {
      problem(`${file.name} is neither a picture nor a clip (${file.type || "unknown type"})`);
      continue;
    }
    try {
      const url = await dataUrl(file);
      attached.push({ file, part: { type: `${kind}_url`, [`${kind}_url`]: { url } } });
    } catch (error) {
      problem(`${file.name} cannot be read: ${error.message}`);
    }
  }
  showAttached();
}

function shownMedium(file) {
  const isClip = file.type.startsWith("video/");
  const shown = element(isClip ? "video" : "img");
  shown.src = URL.createObjectURL(file);
  if (isClip) shown.controls = true;
  else shown.alt = file.name;
  return shown;
}

function showAttached() {
  byId("attached").querySelectorAll("img, video").forEach((old) => URL.revokeObjectURL(old.src));
  byId("attached").replaceChildren(...attached.map((entry) => {
    const figure = element("figure");
    const remove = element("button", "×");
    remove.type = "button";
    remove.title = `Remove ${entry.file.name}`;
    remove.onclick = () => {
      attached = attached.filter((other) => other !== entry);
      showAttached();
    };
    figure.append(shownMedium(entry.file), remove);
    return figure;
  }));
}

// ---- the request ----

function numberOf(id) {
  const text = byId(id).value.trim();
  return text === "" ? undefined : Number(text);
}

// Functions alone, or with their wrapper; the gateway takes both.
function tools() {
  const text = byId("tools").value.trim();
  if (!text) return undefined;
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Error(`the tools are not valid JSON: ${error.message}`);
  }
}

function requestBody() {
  const system = byId("system").value.trim();
  return {
    messages: system ? [{ role: "system", content: system }, ...messages] : messages,
    stream: true,
    stream_options: { include_usage: true },
    thinking: { type: byId("thinking").value },
    temperature: numberOf("temperature"),
    max_tokens: numberOf("max-tokens"),
    seed: numberOf("seed"),
    tools: tools(),
  };
}

// The JSON of each server-sent event; `[DONE]` ends them.
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const blocks = (rest + value).split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      const lines = block.split("\n").filter((line) => line.startsWith("data:"));
      const data = lines.map((line) => line.slice(5).trim()).join("\n");
      if (data === "[DONE]") return;
      if (data) yield JSON.parse(data);
    }
  }
}

async function errorOf(response) {
  const text = await response.text();
  try {
    const { error } = JSON.parse(text);
    return `${response.status}: ${error.message}`;
  } catch {
    return `${response.status}: ${text.slice(0, 300)}`;
  }
}

// ---- the reply ----

// One reply on the page, and the message that it adds up to.
class Reply {
  constructor() {
    this.began = performance.now();
    this.content = "";
    this.reasoning = "";
    this.calls = [];
    this.turn = element("article", undefined, "turn assistant");
    this.facts = element("div", undefined, "facts");
    this.turn.append(this.facts);
    log.append(this.turn);
  }

  // Parts stand in the order in which they came.
  part(kind, build) {
    if (this.open?.kind !== kind) {
      this.open = { kind, place: build() };
      this.facts.before(this.open.place.outer);
    }
    return this.open.place;
  }

  add(delta) {
    const thought = delta.reasoning_content ?? delta.reasoning;
    if (thought || delta.content || delta.tool_calls?.length) {
      this.first ??= performance.now();
      this.last = performance.now();
    }
    if (thought) {
      this.reasoning += thought;
      this.write(this.part("thinking", thinkingPart).words, thought);
    }
    if (delta.content) {
      this.endThinking();
      this.content += delta.content;
      this.write(this.part("words", wordsPart).words, delta.content);
    }
    for (const piece of delta.tool_calls ?? []) this.addCall(piece);
  }

  // Text that waits has one place: what comes for another shows it first.
  write(place, text) {
    if (this.waiting && this.waiting.place !== place) this.show();
    this.waiting ??= { place, text: "", timer: setTimeout(() => this.show(), SHOW_MS) };
    this.waiting.text += text;
  }

  show() {
    if (!this.waiting) return;
    clearTimeout(this.waiting.timer);
    this.waiting.place.append(this.waiting.text);
    this.waiting = null;
    follow();
  }

  addCall(piece) {
    this.endThinking();
    const call = (this.calls[piece.index] ??= { id: "", name: "", arguments: "" });
    call.id = piece.id ?? call.id;
    call.name = piece.function.name ?? call.name;
    call.arguments += piece.function.arguments ?? "";
    call.place = this.part(`call ${piece.index}`, callPart);
    call.place.title.textContent = call.name;
    call.place.words.textContent = indented(call.arguments);
  }

  endThinking() {
    if (this.open?.kind === "thinking") {
      this.open.place.outer.open = false;
      this.open.place.title.textContent =
        `Thought for ${((performance.now() - this.first) / 1000).toFixed(1)} s`;
    }
  }

  // The message as the next request sends it; calls that were cut off are nobody's to answer.
  message(withCalls) {
    const message = { role: "assistant", content: this.content };
    if (this.reasoning) message.reasoning_content = this.reasoning;
    if (withCalls) {
      message.tool_calls = this.calls.map((call) => ({
        id: call.id, type: "function", function: { name: call.name, arguments: call.arguments },
      }));
    }
    return message;
  }

  tell(facts) {
    const shown = facts.filter(([, value]) => value !== undefined && value !== "");
    this.facts.replaceChildren(...shown.map(([name, value]) => element("span", `${name} ${value}`)));
  }
}

function thinkingPart() {
  const outer = element("details", undefined, "thinking");
  const title = element("summary", "Thinking");
  const words = element("div", undefined, "words");
  outer.open = true;
  outer.append(title, words);
  return { outer, title, words };
}

function wordsPart() {
  const outer = element("div", undefined, "words");
  return { outer, words: outer };
}

function callPart() {
  const outer = element("section", undefined, "call");
  const title = element("strong");
  const words = element("pre");
  outer.append("calls ", title, words);
  return { outer, title, words };
}

function indented(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}

// Where the user plays the tools: one result a call, then the chat goes on.
function askResults(reply) {
  const fields = reply.calls.map((call) => {
    const field = element("textarea");
    field.rows = 2;
    field.placeholder = `what ${call.name} gives`;
    field.setAttribute("aria-label", `Result of ${call.name}`);
    call.place.outer.append(field);
    return field;
  });
  const button = element("button", "Send results");
  button.type = "button";
  button.className = "results";
  button.onclick = () => {
    if (running) return;
    const mark = messages.length;
    awaitsResults = false;
    fields.forEach((field, index) => {
      field.disabled = true;
      messages.push({
        role: "tool", tool_call_id: reply.calls[index].id, content: field.value,
      });
    });
    button.remove();
    generate(mark, () => {
      awaitsResults = true;
      fields.forEach((field) => (field.disabled = false));
      reply.facts.before(button);
    });
  };
  reply.facts.before(button);
  awaitsResults = true;
}

function showTimes(reply, usage, response, reason) {
  const seconds = (ms) => `${(ms / 1000).toFixed(2)} s`;
  const span = reply.last - reply.first;
  const made = usage?.completion_tokens;
  const prompt = usage?.prompt_tokens_details ?? {};
  reply.tell([
    ["ended by", reason],
    ["first token", reply.first && seconds(reply.first - reply.began)],
    ["all", seconds(performance.now() - reply.began)],
    ["tokens/s", made > 1 && span > 0 ? (((made - 1) * 1000) / span).toFixed(1) : undefined],
    ["prompt", usage && `${usage.prompt_tokens} tokens`],
    ["cached", prompt.cached_tokens || undefined],
    ["pictures", prompt.image_tokens || undefined],
    ["clips", prompt.video_tokens || undefined],
    ["reply", usage && `${made} tokens`],
    ["thinking", usage?.completion_tokens_details.reasoning_tokens || undefined],
    ["server", (response?.headers.get("server-timing") ?? "").replace(/;dur=([\d.]+)/g, " $1 ms")],
    ["id", response?.headers.get("x-request-id") ?? undefined],
  ]);
}

// Sends the chat and shows the reply; on failure the messages from `mark` on are taken back.
async function generate(mark, takeBack) {
  const chat = messages;
  const rollBack = () => {
    chat.length = mark;
    if (chat === messages) takeBack();
  };
  running = new AbortController();
  busy(true);
  const reply = new Reply();
  let usage, response, reason;
  try {
    const body = JSON.stringify(requestBody());
    response = await fetch("v1/chat/completions", {
      method: "POST", headers: headers(), body, signal: running.signal,
    });
    if (!response.ok) throw new Error(await errorOf(response));
    for await (const event of events(response.body)) {
      if (event.error) throw new Error(event.error.message);
      usage = event.usage ?? usage;
      for (const choice of event.choices) {
        reply.add(choice.delta);
        reason = choice.finish_reason ?? reason;
      }
    }
    if (!reason) throw new Error("the connection ended before the reply did");
    const calls = reason === "tool_calls";
    chat.push(reply.message(calls));
    reply.endThinking();
    showTimes(reply, usage, response, reason);
    if (calls && chat === messages) askResults(reply);
  } catch (error) {
    if (error.name === "AbortError") {
      reply.endThinking();
      if (reply.content) chat.push(reply.message(false));
      else rollBack();
      showTimes(reply, usage, response, "you");
    } else {
      reply.facts.before(element("p", error.message, "error"));
      if (response?.status === 401) byId("settings").open = true;
      rollBack();
      askState();
    }
  } finally {
    reply.show();
    running = null;
    busy(false);
    follow();
  }
}

function busy(is) {
  byId("send").hidden = is;
  byId("stop").hidden = !is;
  log.setAttribute("aria-busy", String(is));
}

function follow() {
  log.scrollTop = log.scrollHeight;
}

function problem(text) {
  log.append(element("p", text, "error"));
  follow();
}

// ---- the page ----

async function send() {
  await reading;
  const text = byId("text").value.trim();
  if (running || (!text && !attached.length)) return;
  if (awaitsResults) {
    problem("the model waits for the results of its calls; send those first, or begin a new chat");
    return;
  }
  const parts = attached.map((entry) => entry.part);
  const content = parts.length ? [...parts, ...(text ? [{ type: "text", text }] : [])] : text;
  const media = attached;
  const turn = element("article", undefined, "turn user");
  if (media.length) {
    const place = element("div", undefined, "media");
    place.append(...media.map((entry) => shownMedium(entry.file)));
    turn.append(place);
  }
  turn.append(element("div", text, "words"));
  byId("hint")?.remove();
  log.append(turn);
  byId("text").value = "";
  attached = [];
  showAttached();
  const mark = messages.length;
  messages.push({ role: "user", content });
  generate(mark, () => {
    // to be sent again as it was, unless something new was written since
    if (!byId("text").value && !attached.length) {
      byId("text").value = text;
      attached = media;
      showAttached();
    }
  });
}

function clear() {
  running?.abort();
  messages = [];
  awaitsResults = false;
  log.querySelectorAll("img, video").forEach((old) => URL.revokeObjectURL(old.src));
  log.replaceChildren();
}

byId("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
byId("text").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    send();
  }
});
byId("text").addEventListener("paste", (event) => {
  if (event.clipboardData.files.length) attach(event.clipboardData.files);
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") running?.abort();
});
document.addEventListener("dragover", (event) => {
  event.preventDefault();
  document.body.classList.add("dropping");
});
document.addEventListener("dragleave", (event) => {
  if (!event.relatedTarget) document.body.classList.remove("dropping");
});
document.addEventListener("drop", (event) => {
  event.preventDefault();
  document.body.classList.remove("dropping");
  attach(event.dataTransfer.files);
});
byId("stop").addEventListener("click", () => running?.abort());
byId("clear").addEventListener("click", clear);
byId("attach").addEventListener("click", () => byId("file").click());
byId("file").addEventListener("change", async () => {
  await attach(byId("file").files);
  byId("file").value = "";
});
askState();
