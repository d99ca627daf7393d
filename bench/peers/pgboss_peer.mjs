// pg-boss: at its best with large batches, fetched for as long as they are full; its default is one
// job every two seconds, here in as many loops as pgsched has slots.
import { CONCURRENCY, main, need } from "./peer.mjs";

const { PgBoss } = need("pg-boss");

const best = { batchSize: 1000, burstWhenBatchFull: true };
const usual = { localConcurrency: CONCURRENCY };

async function start(connectionString) {
  const boss = new PgBoss({ connectionString, supervise: false, schedule: false });
  boss.on("error", (error) => console.error(error));
  await boss.start();
  return boss;
}

await main({
  fill: async (connectionString, steps) => {
    const boss = await start(connectionString);
    await boss.createQueue("noop");
    for (const step of steps) await boss.insert("noop", step.map((i) => ({ data: { i } })));
  },
  work: async (connectionString, atBest) => {
    const boss = await start(connectionString);
    await boss.work("noop", atBest ? best : usual, async () => {});
  },
});
