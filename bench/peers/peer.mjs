// What the adapters of Node peers share: the command line of peer.py. NODE_PEERS is the folder with
// their node_modules.
import { createRequire } from "node:module";

export const CONCURRENCY = 10;
export const need = createRequire(`${process.env.NODE_PEERS}/`);
const STEP = 1000;

export async function main({ fill, work }) {
  const [dsn, command, option] = process.argv.slice(2);
  if (command === "fill") {
    const numbers = Array.from({ length: Number(option) }, (_, i) => i);
    const steps = Array.from({ length: Math.ceil(numbers.length / STEP) }, (_, k) =>
      numbers.slice(k * STEP, (k + 1) * STEP));
    await fill(dsn, steps);
    process.exit(0);
  }
  console.log("READY");
  process.stdin.on("end", () => process.exit(0));
  await new Promise((start) => process.stdin.once("data", start));
  await work(dsn, option === "best");
}
