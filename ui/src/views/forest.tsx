// A trajectory as a forest: solid lines follow the order of decisions (`after`), dashed ones the token sequences (`extends`).
import { useMemo } from "preact/hooks";
import { type Maybe, useAsk } from "../api";
import { num, signed } from "../format";
import { Loading, tint } from "../parts";
import { link } from "../route";

interface Node {
  id: number;
  after: Maybe<number>;
  extends: Maybe<number>;
  agent: string;
  action: Maybe<string>;
  text: string;
  reward: number;
  success: Maybe<boolean>;
  value: number;
  advantage: Maybe<number>;
  weight: number;
  count: number;
  tokens: number;
  untrained: Maybe<string>;
}

const STEP_X = 118;
const STEP_Y = 46;
const MOST = 1500;

interface Placed extends Node {
  x: number;
  y: number;
}

/** A node's column is its depth; leaves take rows from top to bottom, and a node stands in the middle of its children. */
function layout(nodes: Node[]): Placed[] {
  const children = new Map<number | null, number[]>();
  for (const node of nodes) {
    const key = node.after ?? null;
    children.set(key, [...(children.get(key) ?? []), node.id]);
  }
  const place = new Map<number, { x: number; y: number }>();
  let row = 0;
  const stack: [number, number, boolean][] = [...(children.get(null) ?? [])].reverse().map((id) => [id, 0, false]);
  while (stack.length) {
    const [id, depth, done] = stack.pop()!;
    const below = children.get(id) ?? [];
    if (done || !below.length) {
      const ys = below.map((child) => place.get(child)!.y);
      place.set(id, { x: depth, y: ys.length ? (Math.min(...ys) + Math.max(...ys)) / 2 : row++ });
    } else {
      stack.push([id, depth, true]);
      for (const child of [...below].reverse()) stack.push([child, depth + 1, false]);
    }
  }
  const agents = [...new Set(nodes.map((node) => node.agent))];
  const lanes = row === 1 && agents.length > 1;  // a chain of several agents: a lane for each of them
  return nodes.map((node) => ({ ...node, ...place.get(node.id)!, ...(lanes ? { y: agents.indexOf(node.agent) } : {}) }));
}

export function ForestView({ run, rollout, turn }: { run: string; rollout: string; turn: number | null }) {
  const { data, error, indexing } = useAsk<{ nodes: Node[]; advantage_name: Maybe<string> }>("forest", { run, rollout });
  const placed = useMemo(() => layout((data?.nodes ?? []).slice(0, MOST)), [data]);
  if (!data) return <Loading error={error} indexing={indexing} />;
  if (!placed.length) return <p class="faded">the trajectory has no turn</p>;
  const strongest = Math.max(1e-9, ...placed.map((node) => Math.abs(node.advantage ?? 0)));
  const width = (Math.max(...placed.map((node) => node.x)) + 1) * STEP_X + 30;
  const height = (Math.max(...placed.map((node) => node.y)) + 1) * STEP_Y + 26;
  const at = (node: Placed): [number, number] => [20 + node.x * STEP_X, 30 + node.y * STEP_Y];
  const agents = [...new Set(placed.map((node) => node.agent))];
  const curve = (from: Placed, to: Placed, bend: number) => {
    const [x0, y0] = at(from);
    const [x1, y1] = at(to);
    const middle = (x0 + x1) / 2;
    return bend ? `M${x0} ${y0} Q${middle} ${(y0 + y1) / 2 - bend} ${x1} ${y1}` : `M${x0} ${y0} C${middle} ${y0} ${middle} ${y1} ${x1} ${y1}`;
  };
  return (
    <>
      <p class="beside">
        <span class="forest-key after" /> the decision before it (after) <span class="forest-key extends" /> the turn whose token sequence its prompt continues (extends); without one, a new sequence begins
        {agents.length > 1 && agents.map((agent, place) => <span key={agent} class={`key tone${place}`}>{agent}</span>)}
        {data.advantage_name ? ` · V value, A advantage by ${data.advantage_name}` : ""}
        {data.nodes.length > MOST ? ` · the first ${num(MOST)} of ${num(data.nodes.length)} turns` : ""}
      </p>
      <div class="forest" tabIndex={0} role="group" aria-label={`forest of ${placed.length} turns`}>
        <svg width={width} height={height} viewBox={`0 0 ${width} ${height}`}>
          {placed.map((node) => node.after !== null && node.after !== undefined && <path key={`a${node.id}`} class="after" style={{ strokeWidth: String(1 + 2 * node.weight) }} d={curve(placed[node.after]!, node, 0)} />)}
          {placed.map((node) => node.extends !== null && node.extends !== undefined && <path key={`e${node.id}`} class="extends" d={curve(placed[node.extends]!, node, node.extends === node.after ? 14 : 30)} />)}
          {placed.map((node) => {
            const [x, y] = at(node);
            const label = node.action ?? node.text.slice(0, 14);
            return (
              <a key={node.id} href={link(["run", run, "trajectory", rollout], { turn: node.id })} aria-label={`turn ${node.id + 1}, ${node.agent}, ${label}, value ${num(node.value)}, advantage ${signed(node.advantage)}`}>
                <g class={`node tone${agents.indexOf(node.agent)}${node.id === turn ? " chosen" : ""}${node.untrained ? " untrained" : ""}`}>
                  <title>{`turn ${node.id + 1} · ${node.agent}\n${node.text}\nvalue ${num(node.value)} · advantage ${signed(node.advantage)} · weight ${num(node.weight)} · reward ${num(node.reward)}${node.untrained ? `\nnot trained: ${node.untrained}` : ""}`}</title>
                  <circle class="ground" cx={x} cy={y} r="9" />
                  <circle class="face" cx={x} cy={y} r="9" style={{ fill: node.advantage === null || node.advantage === undefined ? "none" : tint(node.advantage / strongest) }} />
                  {node.success === true && <path class="tick-mark" d={`M${x - 4} ${y}l3 3 5-6`} />}
                  <text class="node-name" x={x + 13} y={y - 2}>{clip(label)}{node.count > 1 ? ` ×${node.count}` : ""}</text>
                  <text class="node-value" x={x + 13} y={y + 11}>V {num(node.value, 2)} · A {signed(node.advantage === null || node.advantage === undefined ? null : Number(node.advantage.toFixed(2)))}</text>
                </g>
              </a>
            );
          })}
        </svg>
      </div>
    </>
  );
}

function clip(text: string): string {
  const line = text.replace(/\s+/g, " ").trim();
  return line.length > 13 ? `${line.slice(0, 12)}…` : line || "–";
}
