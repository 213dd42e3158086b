// What the Node client scripts share; the counterpart of steps.py.

export const root = process.argv[2];
export const url = `${root}/v1`;
export const model = "foredraft-demo";
export const question = "What is speculative decoding?";
export const ask = [{ role: "user", content: question }];
export const city = {
  type: "object",
  properties: { city: { type: "string", enum: ["Paris", "Rome"] } },
  required: ["city"],
  additionalProperties: false,
};
export const capital = {
  type: "object",
  properties: { ...city.properties, capital: { type: "boolean" } },
  required: ["city", "capital"],
  additionalProperties: false,
};

export function check(holds, value) {
  if (!holds) throw new Error(typeof value === "string" ? value : JSON.stringify(value));
  return value;
}

export function called(name, given) {
  const found = typeof given === "string" ? JSON.parse(given) : given;
  check(name === "get_weather" && ["Paris", "Rome"].includes(found.city), { name, found });
  return `${name}(${found.city})`;
}

export const isCapital = (found) =>
  ["Paris", "Rome"].includes(found.city) && typeof found.capital === "boolean";

export function streamed(pieces) {
  check(pieces.filter((piece) => piece).length > 1, pieces);
  return pieces.join("");
}

export async function run(steps) {
  for (const [step, ask] of Object.entries(steps)) {
    const line = { step };
    try {
      line.result = await ask();
    } catch (error) {
      line.error = `${error.name}: ${error.message}`;
    }
    console.log(JSON.stringify(line));
  }
}
