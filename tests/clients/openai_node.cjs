// Run by test_openai_node.py: the `openai` client for Node against the router; prints what it saw as JSON.
const { OpenAI, toFile } = require("openai");

const client = new OpenAI({ baseURL: process.env.ROUTER, apiKey: process.env.ROUTER_KEY, maxRetries: 0 });
const messages = [{ role: "user", content: "hi" }];
const tools = [{ type: "function", function: { name: "weather", parameters: { type: "object", properties: {} } } }];

async function failure(work) {
  try {
    await work;
    return null;
  } catch (error) {
    return [error.constructor.name, error.status, error.code];
  }
}

async function main() {
  const seen = {};
  const plain = await client.chat.completions.create({ model: "m", messages });
  seen.plain = [plain.choices[0].message.content, plain.usage.total_tokens];
  seen.stream = "";
  const options = { include_usage: true };
  for await (const chunk of await client.chat.completions.create({ model: "m", messages, stream: true, stream_options: options })) {
    seen.stream += chunk.choices[0]?.delta?.content ?? "";
    seen.usage = chunk.usage?.total_tokens ?? seen.usage;
  }
  const called = await client.chat.completions.stream({ model: "m", messages, tools }).finalChatCompletion();
  seen.tool = called.choices[0].message.tool_calls[0].function.arguments;
  const vectors = await client.embeddings.create({ model: "m", input: ["a", "b"] });
  seen.embedding = Array.from(vectors.data[1].embedding);
  seen.response = (await client.responses.create({ model: "m", input: "hi" })).output_text;
  seen.events = "";
  for await (const event of await client.responses.create({ model: "m", input: "hi", stream: true })) {
    if (event.type === "response.output_text.delta") seen.events += event.delta;
  }
  seen.models = (await client.models.list()).data.map((model) => model.id);
  const headers = { "x-twolane-model": "m" };
  const file = await toFile(Buffer.from("12345678"), "b.jsonl");
  const made = await client.files.create({ file, purpose: "batch" }, { headers });
  seen.file = [made.bytes, made.filename];
  seen.content = await (await client.files.content("file-1", { headers })).text();
  const sound = await toFile(Buffer.alloc(2000000), "a.mp3");
  seen.heard = (await client.audio.transcriptions.create({ model: "m", file: sound })).text;
  const speech = await client.audio.speech.create({ model: "m", voice: "alloy", input: "hi" });
  seen.spoken = Array.from(Buffer.from(await speech.arrayBuffer()));
  seen.image = (await client.images.generate({ model: "m", prompt: "a cat" })).data[0].b64_json;
  seen.errors = [
    await failure(client.chat.completions.create({ model: "nowhere", messages })),
    await failure(client.chat.completions.create({ model: "busy", messages })),
    await failure(client.chat.completions.create({ model: "long", messages })),
    await failure(client.files.retrieve("file-2", { headers })),
    await failure(client.withOptions({ apiKey: "sk-wrong" }).chat.completions.create({ model: "m", messages })),
  ];
  console.log(JSON.stringify(seen));
}

main();
