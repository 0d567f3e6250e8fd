// Calls the public API as a tenant and shows the answer as it arrives.
const form = document.getElementById("chat");
const stop = document.getElementById("stop");
const send = form.querySelector("button[type=submit]");
const status = document.getElementById("chat-status");
const answer = document.getElementById("answer");

async function ask(signal) {
  const began = performance.now();
  const response = await fetch("/v1/chat/completions", {
    method: "POST",
    signal,
    credentials: "omit",
    headers: {
      "Content-Type": "application/json",
      Authorization: `Bearer ${document.getElementById("tenant-key").value.trim()}`,
    },
    body: JSON.stringify({
      model: document.getElementById("model").value,
      messages: [{ role: "user", content: document.getElementById("prompt").value }],
      stream: true,
      stream_options: { include_usage: true },
    }),
  });
  if (!response.ok) {
    const problem = await response.json().catch(() => null);
    throw new Error(problem?.error?.message ?? `The gateway answered ${response.status}.`);
  }
  const usage = await show(response.body.pipeThrough(new TextDecoderStream()).getReader());
  const seconds = (performance.now() - began) / 1000;
  const tokens = usage ? `${usage.completion_tokens} tokens in ` : "";
  const id = response.headers.get("x-request-id");
  status.textContent = `Done: ${tokens}${seconds.toFixed(1)} s. Request ${id} in the audit log.`;
}

// Reads server-sent events to their end and returns the usage, if any.
async function show(reader) {
  let rest = "";
  let usage = null;
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return usage;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data: ") || line === "data: [DONE]") continue;
      const frame = JSON.parse(line.slice(6));
      if (frame.error) throw new Error(frame.error.message);
      usage = frame.usage ?? usage;
      answer.textContent += frame.choices?.[0]?.delta?.content ?? "";
    }
  }
}

let stopping = null;

form.addEventListener("submit", async (event) => {
  event.preventDefault();
  if (stopping !== null) return;
  stopping = new AbortController();
  answer.textContent = "";
  status.textContent = "Waiting for the answer…";
  stop.disabled = false;
  send.disabled = true;
  try {
    await ask(stopping.signal);
  } catch (problem) {
    status.textContent = problem.name === "AbortError" ? "Stopped." : `Failed: ${problem.message}`;
  } finally {
    stopping = null;
    stop.disabled = true;
    send.disabled = false;
  }
});
stop.addEventListener("click", () => stopping?.abort());
