// OpenAI's client in JavaScript, unmodified: node openai.mjs SCENARIO URL MODEL [PICTURE]
import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import OpenAI from "openai";

const [scenario, url, model, picture] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "How is the weather in Köln?" }];
const parameters = {
  type: "object",
  properties: { city: { type: "string" }, days: { type: "integer" } },
};
const tools = [{ type: "function", function: { name: "weather", parameters } }];
const wanted = { city: "Köln", days: 3 };

const scenarios = {
  async stream() {
    const settings = { model, messages, max_tokens: 30, temperature: 1, seed: 11 };
    settings.thinking = { type: "disabled" };
    // words come whatever the model would say
    settings.structured_outputs = { regex: "[a-z ]{20,40}" };
    const whole = await client.chat.completions.create(settings);
    const runner = client.chat.completions.stream({
      ...settings,
      stream_options: { include_usage: true },
    });
    let text = "";
    for await (const chunk of runner) text += chunk.choices[0]?.delta.content ?? "";
    const streamed = await runner.finalChatCompletion();
    assert.notEqual(text, "");
    assert.equal(text, whole.choices[0].message.content);
    assert.equal(streamed.choices[0].message.content, text);
    assert.deepEqual(streamed.usage.completion_tokens, whole.usage.completion_tokens);
    assert.equal((await client.models.list()).data[0].id, model);
  },

  async picture() {
    const image = `data:image/jpeg;base64,${readFileSync(picture).toString("base64")}`;
    const content = [
      { type: "image_url", image_url: { url: image } },
      { type: "text", text: "What is in this picture?" },
    ];
    const settings = { model, messages: [{ role: "user", content }], max_tokens: 4 };
    const answer = await client.chat.completions.create(settings);
    // 640x480 becomes 644x476: 23 x 17 merged patches
    assert.ok(answer.usage.prompt_tokens > 23 * 17);
  },

  async errors() {
    const wrong = client.chat.completions.create({ model, messages, temperature: 3 });
    await assert.rejects(wrong, (error) => {
      assert.ok(error instanceof OpenAI.BadRequestError);
      assert.equal(error.param, "temperature");
      assert.ok(error.requestID);
      return true;
    });
    const unknown = client.chat.completions.create({ model: "none-such", messages });
    await assert.rejects(unknown, OpenAI.NotFoundError);
  },

  async tools() {
    const runner = client.chat.completions.stream({ model, messages, tools });
    const pieces = [];
    runner.on("tool_calls.function.arguments.delta", (event) => pieces.push(event.arguments_delta));
    const { message, finish_reason: reason } = (await runner.finalChatCompletion()).choices[0];
    assert.equal(reason, "tool_calls");
    const [call] = message.tool_calls;
    assert.deepEqual([call.function.name, JSON.parse(call.function.arguments)], ["weather", wanted]);
    assert.ok(pieces.length > 1);
    const longer = [
      ...messages,
      message,
      { role: "tool", tool_call_id: call.id, content: "sunny" },
    ];
    const first = await client.chat.completions.create({ model, messages, tools });
    const second = await client.chat.completions.create({ model, messages: longer, tools });
    assert.ok(second.usage.prompt_tokens > first.usage.prompt_tokens);
    assert.deepEqual(first.choices[0].message.tool_calls[0].function.arguments, call.function.arguments);
  },

  // the client's own loop: it calls the function and sends what came back, until told to stop
  async loop() {
    const asked = [];
    const run = client.chat.completions.runTools(
      {
        model,
        messages,
        tools: [
          {
            type: "function",
            function: {
              name: "weather",
              parameters,
              parse: JSON.parse,
              function: (args) => {
                asked.push(args);
                return "sunny";
              },
            },
          },
        ],
      },
      { maxChatCompletions: 2 },
    );
    await run.done().catch(() => {});
    assert.deepEqual(asked[0], wanted);
    assert.equal(run.messages.filter((one) => one.role === "tool")[0].content, "sunny");
  },

  async responses() {
    const flat = [{ type: "function", name: "weather", parameters, strict: false }];
    const stream = client.responses.stream({ model, input: messages, tools: flat, store: false });
    let text = "";
    for await (const event of stream) {
      if (event.type === "response.output_text.delta") text += event.delta;
    }
    const response = await stream.finalResponse();
    const call = response.output.find((item) => item.type === "function_call");
    assert.equal(response.output_text, text);
    assert.deepEqual(JSON.parse(call.arguments), wanted);
    assert.equal(response.status, "completed");
  },
};

await scenarios[scenario]();
