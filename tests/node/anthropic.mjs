// Anthropic's client in JavaScript, unmodified: node anthropic.mjs SCENARIO URL MODEL [PICTURE]
import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import Anthropic from "@anthropic-ai/sdk";

const [scenario, url, model, picture] = process.argv.slice(2);
const client = new Anthropic({ baseURL: url, apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "How is the weather in Köln?" }];
const tools = [
  {
    name: "weather",
    input_schema: {
      type: "object",
      properties: { city: { type: "string" }, days: { type: "integer" } },
    },
  },
];
const settings = { model, messages, max_tokens: 200 };
const level = {
  type: "object",
  properties: { level: { enum: ["low", "high"] } },
  required: ["level"],
  additionalProperties: false,
};

const scenarios = {
  async stream() {
    const wishes = { ...settings, max_tokens: 30, temperature: 1, seed: 11 };
    // words come whatever the model would say
    wishes.output_config = { format: { type: "json_schema", schema: level } };
    const whole = await client.messages.create(wishes);
    const stream = client.messages.stream(wishes);
    let text = "";
    stream.on("text", (piece) => (text += piece));
    const message = await stream.finalMessage();
    assert.notEqual(text, "");
    assert.equal(text, whole.content[0].text);
    assert.equal(message.content[0].text, text);
    assert.equal(message.stop_reason, whole.stop_reason);
    assert.deepEqual(message.usage.output_tokens, whole.usage.output_tokens);
  },

  async picture() {
    const data = readFileSync(picture).toString("base64");
    const content = [
      { type: "image", source: { type: "base64", media_type: "image/jpeg", data } },
      { type: "text", text: "What is in this picture?" },
    ];
    const asked = [{ role: "user", content }];
    const count = await client.messages.countTokens({ model, messages: asked });
    const answer = await client.messages.create({ ...settings, messages: asked, max_tokens: 4 });
    const { input_tokens: fresh, cache_read_input_tokens: cached } = answer.usage;
    assert.equal(count.input_tokens, fresh + cached);
    assert.ok(count.input_tokens > 23 * 17);
  },

  async errors() {
    const unknown = client.messages.create({ ...settings, model: "none-such" });
    await assert.rejects(unknown, Anthropic.NotFoundError);
    const wrong = client.messages.create({ ...settings, temperature: 7 });
    await assert.rejects(wrong, (error) => {
      assert.ok(error instanceof Anthropic.BadRequestError);
      assert.equal(error.error.error.type, "invalid_request_error");
      assert.ok(error.requestID);
      return true;
    });
  },

  async tools() {
    const wishes = { ...settings, tools, thinking: { type: "enabled", budget_tokens: 1024 } };
    wishes.max_tokens = 4096;
    const stream = client.messages.stream({ ...wishes });
    const pieces = [];
    stream.on("inputJson", (piece) => pieces.push(piece));
    const message = await stream.finalMessage();
    const kinds = message.content.map((block) => block.type);
    assert.deepEqual(kinds, ["thinking", "text", "tool_use"]);
    const call = message.content.at(-1);
    assert.deepEqual(call.input, { city: "Köln", days: 3 });
    assert.equal(message.stop_reason, "tool_use");
    assert.ok(pieces.length > 1);
    const result = { type: "tool_result", tool_use_id: call.id, content: "sunny" };
    const longer = [
      ...messages,
      { role: "assistant", content: message.content },
      { role: "user", content: [result] },
    ];
    const second = await client.messages.create({ ...wishes, messages: longer });
    assert.ok(second.usage.input_tokens > message.usage.input_tokens);
  },

  // the client's own loop of tools
  async loop() {
    const asked = [];
    const runner = client.beta.messages.toolRunner({
      ...settings,
      max_iterations: 2,
      tools: [
        {
          ...tools[0],
          type: "custom",
          run: (input) => {
            asked.push(input);
            return "sunny";
          },
          parse: (input) => input,
        },
      ],
    });
    await runner.runUntilDone();
    assert.deepEqual(asked[0], { city: "Köln", days: 3 });
  },
};

await scenarios[scenario]();
