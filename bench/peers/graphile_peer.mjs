// graphile-worker: at its best with a local queue and completions in batches, in the sizes of its
// own performance test; its default has neither, and here as many jobs at once as pgsched.
import { CONCURRENCY, main, need } from "./peer.mjs";

const { Logger, makeWorkerUtils, run } = need("graphile-worker");
const logger = new Logger(() => () => {});

const best = {
  concurrentJobs: 24,
  maxPoolSize: 25,
  localQueue: { size: 500, refetchDelay: { durationMs: 10 } },
  completeJobBatchDelay: 0,
  failJobBatchDelay: 0,
};
const usual = { concurrentJobs: CONCURRENCY, maxPoolSize: CONCURRENCY + 2 };

await main({
  fill: async (connectionString, steps) => {
    const utils = await makeWorkerUtils({ connectionString, logger });
    await utils.migrate();
    for (const step of steps)
      await utils.addJobs(step.map((i) => ({ identifier: "noop", payload: { i } })));
  },
  work: (connectionString, atBest) =>
    run({
      noHandleSignals: true,
      taskList: { noop: async () => {} },
      preset: { worker: { connectionString, logger, ...(atBest ? best : usual) } },
    }),
});
