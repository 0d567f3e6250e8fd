// The code that sends a request to the public API. The key is read from the environment.
const indented = (text, by) => text.replaceAll("\n", `\n${" ".repeat(by)}`);
const shell = (text) => `'${text.replaceAll("'", "'\\''")}'`;

// The escapes of JSON's strings mean the same in Python.
function python(value) {
  if (Array.isArray(value)) return `[\n    ${value.map((one) => `${indented(python(one), 4)},`).join("\n    ")}\n]`;
  if (value !== null && typeof value === "object") {
    return `{${Object.entries(value).map(([name, one]) => `${JSON.stringify(name)}: ${python(one)}`).join(", ")}}`;
  }
  if (typeof value === "boolean") return value ? "True" : "False";
  return JSON.stringify(value);
}

export const snippets = {
  curl: (base, body) => `curl --no-buffer ${shell(`${base}/chat/completions`)} \\
  --header "Authorization: Bearer $APPLIANCE_KEY" \\
  --header 'Content-Type: application/json' \\
  --data ${shell(JSON.stringify(body))}`,

  python: (base, body) => `import os

import openai

client = openai.OpenAI(base_url=${python(base)}, api_key=os.environ["APPLIANCE_KEY"])
stream = client.chat.completions.create(
    ${Object.entries(body).map(([name, value]) => `${name}=${indented(python(value), 4)},`).join("\n    ")}
)
for chunk in stream:
    if chunk.choices:
        print(chunk.choices[0].delta.content or "", end="", flush=True)`,

  javascript: (base, body) => `const response = await fetch(${JSON.stringify(`${base}/chat/completions`)}, {
  method: "POST",
  headers: {
    Authorization: \`Bearer \${process.env.APPLIANCE_KEY}\`,
    "Content-Type": "application/json",
  },
  body: JSON.stringify(${indented(JSON.stringify(body, null, 2), 2)}),
});
if (!response.ok) throw new Error(await response.text());
for await (const text of response.body.pipeThrough(new TextDecoderStream())) {
  process.stdout.write(text); // server-sent events
}`,
};

// The base URL of the API listener as seen from here; empty if its port is not fixed.
export function baseUrl(host, port, page) {
  if (port === "0") return "";
  const name = ["0.0.0.0", "::", ""].includes(host) ? page.hostname : host;
  return `${page.protocol}//${name.includes(":") && !name.startsWith("[") ? `[${name}]` : name}:${port}/v1`;
}
