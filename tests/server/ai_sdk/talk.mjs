// Talks with a server through the AI SDK and prints what it heard, as one JSON object.
import { createOpenAICompatible } from '@ai-sdk/openai-compatible';
import { APICallError, generateText, Output, stepCountIs, streamText, tool } from 'ai';
import { z } from 'zod';

const [baseURL, apiKey] = process.argv.slice(2);
const provider = createOpenAICompatible({
  name: 'mference',
  baseURL,
  apiKey,
  includeUsage: true,
  supportsStructuredOutputs: true,
});
const model = provider('default');
const question = 'What is the capital of France?';
const forecast = 'What is the weather in Paris?';
const getWeather = tool({
  description: 'Get the weather of a city.',
  inputSchema: z.object({ city: z.string() }),
  execute: async () => ({ temperature: 21, condition: 'sunny' }),
});
const common = { model, maxRetries: 0, temperature: 0, maxOutputTokens: 200 };

const whole = await generateText({ ...common, prompt: question });
const stream = streamText({ ...common, prompt: question });
let streamed = '';
for await (const part of stream.textStream) streamed += part;

const loop = await generateText({
  ...common,
  prompt: forecast,
  tools: { get_weather: getWeather },
  stopWhen: stepCountIs(3),
});
const loopStream = streamText({
  ...common,
  prompt: forecast,
  tools: { get_weather: getWeather },
  stopWhen: stepCountIs(3),
});
const kinds = [];
for await (const part of loopStream.fullStream) {
  if (['tool-call', 'tool-result', 'finish', 'error'].includes(part.type)) kinds.push(part.type);
}

const shaped = await generateText({
  ...common,
  prompt: question,
  output: Output.object({ schema: z.object({ city: z.enum(['Paris', 'Rome']), big: z.boolean() }) }),
});

let refused;
try {
  await generateText({ ...common, model: provider('nothing'), prompt: question });
} catch (error) {
  refused = { known: APICallError.isInstance(error), status: error.statusCode, message: error.message };
}

const legacy = await generateText({
  ...common,
  model: provider.completionModel('default'),
  prompt: 'Once upon a time',
  maxOutputTokens: 8,
});

console.log(
  JSON.stringify({
    whole: { text: whole.text, finish: whole.finishReason, usage: whole.usage },
    streamed: { text: streamed, finish: await stream.finishReason, usage: await stream.usage },
    loop: {
      text: loop.text,
      steps: loop.steps.length,
      call: loop.steps[0].toolCalls[0]?.input,
    },
    kinds,
    loopText: await loopStream.text,
    shaped: shaped.output,
    refused,
    legacy: legacy.text,
  }),
);
