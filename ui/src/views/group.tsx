// The members of a group side by side, with their advantages.
import { type Dict, type Maybe, useAsk } from "../api";
import { count, num, shortId, signed } from "../format";
import { Loading, Notes, Solved, tint } from "../parts";
import { link } from "../route";
import { Rich } from "../text";

interface Member {
  rollout_id: string;
  reward: number;
  penalty: number;
  success: Maybe<number>;
  stop: Maybe<string>;
  observation: string;
  components: Dict<number>;
  tokens: number;
  turn_count: number;
  advantages: Maybe<number[]>;
  caught: string[];
  replaced: Maybe<string>;
  filtered: Maybe<string>;
  turns: { id: number; agent: string; text: string; action: Maybe<string>; reward: Maybe<number>; observation: Maybe<string>; untrained: Maybe<string> }[];
}

interface Group {
  group_id: string;
  advantage_name: Maybe<string>;
  dropped: Maybe<string>;
  notes: string[];
  members: Member[];
}

export function GroupPart({ run, name, group, chosen }: { run: string; name: string; group: string; chosen?: string }) {
  const { data, error, indexing } = useAsk<Group>("group", { run, group });
  if (!data) return <Loading error={error} indexing={indexing} />;
  const all = data.members.flatMap((member) => member.advantages ?? []);
  const strongest = Math.max(1e-9, ...all.map(Math.abs));
  return (
    <>
      <p class="beside">
        {data.members.length} members on the same level{data.advantage_name ? ` · advantages by ${data.advantage_name}` : ""}
        {data.dropped ? ` · the whole group is left out because of ${data.dropped}` : ""}
      </p>
      <Notes lines={data.notes} />
      <div class="members" tabIndex={0} role="list" aria-label="members of the group">
        {data.members.map((member) => {
          const advantage = member.advantages?.length ? member.advantages.reduce((a, b) => a + b, 0) / member.advantages.length : null;
          return (
            <div key={member.rollout_id} role="listitem" class={member.rollout_id === chosen ? "member chosen" : "member"}>
              <header>
                <a href={link(["run", run, "trajectory", member.rollout_id])}>{shortId(member.rollout_id, name).replace(/^.*-/, "")}</a>
                <Solved share={member.success} />
              </header>
              <div class="member-figures">
                <span>reward <b>{num(member.reward)}</b></span>
                <span class="advantage" style={{ background: advantage === null ? undefined : tint(advantage / strongest) }}>A {signed(advantage)}</span>
              </div>
              <div class="beside">{count(member.turn_count, "turn")} · {count(member.tokens, "token")} · {member.stop}</div>
              {Object.entries(member.components).map(([each, value]) => <div key={each} class="beside">{each} {num(value)}</div>)}
              {[...member.caught, ...(member.replaced ? [`replaced: ${member.replaced}`] : [])].map((each) => <span key={each} class="tag warn">{each}</span>)}
              <ol class="member-turns">
                {member.turns.map((turn) => (
                  <li key={turn.id} class={turn.untrained ? "untrained" : ""}>
                    <a href={link(["run", run, "trajectory", member.rollout_id], { turn: turn.id })} style={{ background: member.advantages?.[turn.id] !== undefined && !turn.untrained ? tint(member.advantages[turn.id]! / strongest) : undefined }}>
                      {turn.action ?? (turn.text.slice(0, 60) || "–")}
                    </a>
                    <span class="faded"> {turn.reward ? signed(turn.reward) : ""}</span>
                    {turn.id === member.turns.length - 1 && turn.observation && <Rich text={turn.observation.slice(0, 1200)} />}
                  </li>
                ))}
              </ol>
            </div>
          );
        })}
      </div>
    </>
  );
}
