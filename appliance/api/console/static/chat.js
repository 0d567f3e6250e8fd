// A conversation with a model through the public API, as a tenant.
import { render } from "./markdown.js";
import { baseUrl, snippets } from "./snippets.js";

const UNKNOWN_BASE = "https://gateway.example/v1";
const at = (id) => document.getElementById(id);
const [form, stop, status, conversation, prompt] = ["chat", "stop", "chat-status", "conversation", "prompt"].map(at);
const send = form.querySelector("button[type=submit]");
let turns = []; // { said, answer, body, place, isCurrent }: those that the next request repeats
const placed = new Set(); // every turn on the page, failed ones included
let lastBody = null;
let stopping = null;

function element(name, text, className = "") {
  const made = document.createElement(name);
  made.textContent = text;
  made.className = className;
  return made;
}

function requestBody() {
  const system = at("system").value;
  const parameters = ["temperature", "max_tokens", "top_p", "seed"].filter((name) => at(name).value !== "");
  return {
    model: at("model").value,
    messages: [
      ...(system.trim() ? [{ role: "system", content: system }] : []),
      ...turns.flatMap((turn) => [
        { role: "user", content: turn.said },
        { role: "assistant", content: turn.answer },
      ]),
      { role: "user", content: prompt.value },
    ],
    ...Object.fromEntries(parameters.map((name) => [name, Number(at(name).value)])),
    stream: true,
    stream_options: { include_usage: true },
  };
}

// Sends a request, gives each piece of its answer to `show`, and returns what was measured.
async function ask(body, signal, headers, show) {
  const began = performance.now();
  const response = await fetch("/v1/chat/completions", {
    method: "POST",
    signal,
    credentials: "omit",
    headers: {
      "Content-Type": "application/json",
      Authorization: `Bearer ${at("tenant-key").value.trim()}`,
      "X-Appliance-Metrics": "on",
      ...headers,
    },
    body: JSON.stringify(body),
  });
  const id = response.headers.get("x-request-id");
  show("", id);
  if (!response.ok) {
    const problem = await response.json().catch(() => null);
    throw new Error(problem?.error?.message ?? `The gateway answered ${response.status}.`);
  }
  let [first, last, usage, drafting, isComplete] = [null, null, null, undefined, false];
  for await (const data of events(response.body)) {
    isComplete = data === "[DONE]";
    if (isComplete) break;
    const frame = JSON.parse(data);
    if (frame.error) throw new Error(frame.error.message);
    usage = frame.usage ?? usage;
    if (frame.metrics) drafting = frame.metrics.speculative_decoding ?? null;
    const delta = frame.choices?.[0]?.delta;
    if (delta?.content || delta?.reasoning || delta?.reasoning_content) {
      last = performance.now();
      first ??= last;
    }
    if (delta?.content) show(delta.content, id);
  }
  if (!isComplete) throw new Error("The answer ended before it was complete.");
  const tokens = usage?.completion_tokens;
  return {
    id,
    tokens,
    seconds: (performance.now() - began) / 1000,
    firstSeconds: first === null ? null : (first - began) / 1000,
    // The first token belongs to the time before it.
    rate: tokens > 1 && last > first ? ((tokens - 1) * 1000) / (last - first) : null,
    drafting,
  };
}

async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = ""; ; ) {
    const { done, value } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) if (line.startsWith("data: ")) yield line.slice(6).trimEnd();
  }
}

function show(turn) {
  turn.isCurrent = true;
  const isPlain = at("plain").checked;
  turn.place.classList.toggle("plain", isPlain);
  turn.place.replaceChildren(isPlain ? turn.answer : render(turn.answer));
}

function figure(list, name, value) {
  const row = document.createElement("div");
  const shown = element("dd", value);
  row.append(element("dt", name), shown);
  list.append(row);
  return shown;
}

function showFigures(turn, found) {
  const list = element("dl", "", "figures");
  const length = found.drafting?.mean_acceptance_length;
  const none = found.drafting === null ? "no drafts" : "not reported";
  figure(list, "Time to first token", found.firstSeconds === null ? "–" : `${found.firstSeconds.toFixed(2)} s`);
  figure(list, "Tokens per second", found.rate === null ? "–" : found.rate.toFixed(1));
  figure(list, "Acceptance length", typeof length === "number" ? length.toFixed(2) : none);
  turn.place.parentElement.append(list);
  if (found.rate === null || typeof length !== "number") return;
  const shown = figure(list, "Against target-only", "");
  const measure = element("button", "Send again without speculation", "quiet");
  measure.addEventListener("click", () =>
    exclusively(async (signal) => {
      const other = await ask(turn.body, signal, { "X-Appliance-Speculation": "off" }, () => {});
      if (other.rate === null) throw new Error("The answer was too short to compare.");
      const rates = `${found.rate.toFixed(1)} against ${other.rate.toFixed(1)} tokens/s`;
      shown.textContent = `${(found.rate / other.rate).toFixed(2)}× (${rates})`;
      status.textContent = `Done: measured without speculation. Request ${other.id} in the audit log.`;
    }),
  );
  shown.append(measure);
}

// Runs one request at a time, which Stop ends.
async function exclusively(run) {
  if (stopping !== null) return;
  stopping = new AbortController();
  status.textContent = "Waiting for the answer…";
  [stop.disabled, send.disabled, at("new").disabled] = [false, true, true];
  try {
    await run(stopping.signal);
  } catch (problem) {
    status.textContent = problem.name === "AbortError" ? "Stopped." : `Failed: ${problem.message}`;
  } finally {
    stopping = null;
    [stop.disabled, send.disabled, at("new").disabled] = [true, false, false];
    showCode();
  }
}

form.addEventListener("submit", (event) => {
  event.preventDefault();
  exclusively(async (signal) => {
    const body = requestBody();
    const turn = { said: prompt.value, answer: "", body, place: element("div", "", "answer"), isCurrent: true };
    const [asked, answered] = [element("article", "", "card"), element("article", "", "card")];
    const request = element("p", "", "sub");
    asked.append(element("h3", "You"), element("p", turn.said, "plain"));
    answered.append(element("h3", body.model), turn.place, request);
    conversation.append(asked, answered);
    lastBody = body;
    prompt.value = "";
    try {
      const found = await ask(body, signal, {}, (piece, id) => {
        if (id && !request.hasChildNodes()) {
          const link = element("a", `Request ${id}`);
          link.href = `/console/requests?id=${encodeURIComponent(id)}`;
          request.append(link);
        }
        turn.answer += piece;
        if (turn.isCurrent) requestAnimationFrame(() => show(turn));
        turn.isCurrent = false;
      });
      showFigures(turn, found);
      const tokens = found.tokens === undefined ? "" : `${found.tokens} tokens in `;
      status.textContent = `Done: ${tokens}${found.seconds.toFixed(1)} s. Request ${found.id} in the audit log.`;
      turns.push(turn);
    } catch (problem) {
      // A stopped answer is part of the conversation; after a failure the message can be sent again.
      if (problem.name === "AbortError" && turn.answer) turns.push(turn);
      else prompt.value ||= turn.said;
      answered.append(element("p", problem.name === "AbortError" ? "Stopped." : `Failed: ${problem.message}`, "sub"));
      throw problem;
    } finally {
      show(turn);
      placed.add(turn);
    }
  });
});

at("plain").addEventListener("change", () => placed.forEach(show));
stop.addEventListener("click", () => stopping?.abort());
at("new").addEventListener("click", () => {
  turns = [];
  lastBody = null;
  placed.clear();
  conversation.replaceChildren();
  status.textContent = "New conversation.";
  showCode();
  prompt.focus();
});
// A closed section hides why a form is not sent.
form.addEventListener("invalid", () => (at("parameters").open = true), true);

// The request that Send would send, or the last one if no message is written.
function showCode() {
  const body = prompt.value || lastBody === null ? requestBody() : lastBody;
  const base = (at("base-url").value.trim() || UNKNOWN_BASE).replace(/\/+$/, "");
  at("code").textContent = snippets[at("language").value](base, body);
}
at("base-url").placeholder = UNKNOWN_BASE;
at("base-url").value = baseUrl(at("base-url").dataset.host, at("base-url").dataset.port, location);
document.addEventListener("input", showCode);
showCode();
