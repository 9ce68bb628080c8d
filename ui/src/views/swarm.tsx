// A node of a swarm: its peers, its rounds, what it accepted and why it refused.
import { type Dict, type Maybe, useAsk } from "../api";
import { Histogram, LineChart } from "../charts";
import { ago, num } from "../format";
import { Loading, Section, State, Tile } from "../parts";

interface Node {
  now: number;
  state: string;
  heartbeat: Maybe<{ pid: number; beat: number; time: number; round: number; phase: string; rounds_done: number }>;
  status: Maybe<{
    name: string;
    peer: string;
    swarm: string;
    time: number;
    version: number;
    rounds_done: number;
    rounds: { round: number; reward: Maybe<number>; own_groups: number; foreign_groups: number; evaluation: Maybe<number> }[];
    peers: { name: string; peer: string; alive: boolean; round: Maybe<number> }[];
    accepted: number;
    shared: number;
    refused: Dict<number>;
    quarantined: string[];
    strangers: number;
  }>;
}

export function SwarmView({ run }: { run: string }) {
  const { data, error } = useAsk<Node>("swarm", { run }, 1500);
  if (!data) return <Loading error={error} />;
  const { heartbeat, status } = data;
  if (!status && !heartbeat) return <p class="empty">No node was started here yet.</p>;
  const rounds = status?.rounds ?? [];
  const x = rounds.map((each) => each.round);
  return (
    <>
      <div class="tiles">
        <Tile name="node" value={status?.name ?? "–"} beside={status ? `in swarm ${status.swarm}` : ""} />
        <Tile name="phase" value={heartbeat?.phase ?? "–"} beside={heartbeat ? `round ${num(heartbeat.round)}, last progress ${ago(data.now - heartbeat.time)}` : ""} />
        <Tile name="rounds done" value={num(heartbeat?.rounds_done ?? status?.rounds_done)} beside={status ? `weights of version ${num(status.version)}` : ""} />
        <Tile name="peers alive" value={status ? `${num(status.peers.filter((each) => each.alive).length)} / ${num(status.peers.length)}` : "–"} beside={status?.strangers ? `${num(status.strangers)} more have signed nothing yet` : ""} />
        <Tile name="groups shared" value={num(status?.shared)} />
        <Tile name="groups accepted" value={num(status?.accepted)} beside={`${num(Object.values(status?.refused ?? {}).reduce((a, b) => a + b, 0))} refused`} />
      </div>
      <div class="charts">
        <LineChart title="Reward of own rollouts" xName="round" series={[{ name: "own rollouts", x, y: rounds.map((each) => each.reward), tone: 0 }, { name: "validation", x, y: rounds.map((each) => each.evaluation), tone: 1, dots: true }]} />
        <LineChart title="Groups trained on" xName="round" series={[{ name: "own", x, y: rounds.map((each) => each.own_groups) }, { name: "foreign", x, y: rounds.map((each) => each.foreign_groups) }]} />
      </div>
      <div class="columns">
        <Section title="Peers">
          <table>
            <thead>
              <tr><th>peer</th><th>state</th><th class="right">last round</th><th>key</th></tr>
            </thead>
            <tbody>
              {(status?.peers ?? []).map((each) => (
                <tr key={each.peer}>
                  <td>{each.name}</td>
                  <td>{status?.quarantined.includes(each.name) ? <State state="quarantined" /> : <State state={each.alive ? "alive" : "gone"} />}</td>
                  <td class="right">{num(each.round)}</td>
                  <td class="faded">{each.peer.slice(0, 16)}…</td>
                </tr>
              ))}
            </tbody>
          </table>
          {!status?.peers.length && <p class="faded">no peer has signed a message yet</p>}
        </Section>
        <Section title="Refused, by reason">
          {Object.keys(status?.refused ?? {}).length ? <Histogram title="manifests and groups" unit="" counts={Object.entries(status!.refused).sort((a, b) => b[1] - a[1])} /> : <p class="faded">nothing was refused</p>}
        </Section>
      </div>
    </>
  );
}
