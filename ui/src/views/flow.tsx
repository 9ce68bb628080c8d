// The ledger as a flow: what was opened, where it went, and what was trained on.
import type { Flow, Maybe } from "../api";
import { num } from "../format";

const LOST = ["filtered", "stale", "cancelled", "failed"] as const;

export function FlowChart({ flow }: { flow: Maybe<Flow> }) {
  if (!flow || !flow.opened) return <p class="faded">nothing was opened yet</p>;
  const opened = flow.opened || 1;
  const steps: [string, number, string][] = [
    ["opened", flow.opened, "every rollout that the scheduler has opened"],
    ["finished", flow.opened - flow.running, "no longer queued or played"],
    ["kept", flow.waiting + flow.delivered, "neither left out nor failed"],
    ["delivered", flow.delivered, "handed out in batches"],
  ];
  if (flow.trained !== null && flow.trained !== undefined) steps.push(["trained", flow.trained, "rollouts of steps that changed the weights"]);
  const out: Record<string, [string, number][]> = {
    opened: [["still running", flow.running]],
    finished: LOST.map((name) => [name, flow[name]]),
    kept: [["waiting for their group or batch", flow.waiting]],
    delivered: flow.trained !== null && flow.trained !== undefined ? [["played for validations, or in steps without an update", Math.max(0, flow.delivered - flow.trained)]] : [],
    trained: [],
  };
  const reasons = Object.entries(flow.reasons);
  return (
    <div class="flow">
      <ol aria-label="from opened to trained">
        {steps.map(([name, count, meaning]) => (
          <li key={name}>
            <div class="flow-line" title={meaning}>
              <span class="flow-name">{name}</span>
              <span class="flow-bar" aria-hidden="true">
                <span style={{ width: `${Math.max(0.5, (100 * count) / opened)}%` }} />
              </span>
              <b>{num(count)}</b>
            </div>
            {out[name]!.filter(([, lost]) => lost > 0).map(([why, lost]) => (
              <div key={why} class="flow-out">
                ↳ {num(lost)} {why}
              </div>
            ))}
          </li>
        ))}
      </ol>
      {reasons.length > 0 && (
        <details open={reasons.length <= 6}>
          <summary>why {num(LOST.reduce((sum, name) => sum + flow[name], 0))} were left out</summary>
          <table class="plain-table">
            <tbody>
              {reasons.map(([why, count]) => (
                <tr key={why}>
                  <td class="right">{num(count)}</td>
                  <td>{why}</td>
                </tr>
              ))}
            </tbody>
          </table>
        </details>
      )}
    </div>
  );
}
