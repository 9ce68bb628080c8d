// Questions to the server. Everything that comes back is data; views put it into text nodes.
import { useEffect, useRef, useState } from "preact/hooks";

export type Maybe<T> = T | null | undefined;
export type Dict<T = unknown> = Record<string, T>;

export interface Card {
  id: string;
  name: string;
  kind: string;
  state: string;
  error: Maybe<string>;
  simulated: boolean;
  progress: { steps: number; most_steps: Maybe<number>; share: Maybe<number>; seconds_left: Maybe<number>; unit?: string };
  stage: Maybe<string>;
  reward: Maybe<number>;
  success: Maybe<number>;
  rewards: Maybe<number>[];
  tokens: Maybe<number>;
  prompt_tokens: Maybe<number>;
  cost: Maybe<number>;
  budget: Maybe<Dict<{ spent: number; limit: number }>>;
  seconds: Maybe<number>;
  inflight: Maybe<number>;
  changed: Maybe<number>;
  model: Maybe<string>;
  tags: string[];
  problems: number;
}

export interface Flow {
  opened: number;
  running: number;
  waiting: number;
  delivered: number;
  trained: Maybe<number>;
  failed: number;
  cancelled: number;
  stale: number;
  filtered: number;
  reasons: Dict<number>;
}

export interface Cause {
  cause: string;
  count: number;
  example: string;
}

export type Columns = Dict<Maybe<number>[]>;

export interface Validation {
  step: number;
  reward: Maybe<number>;
  success: Maybe<number>;
  episodes: Maybe<number>;
  tags: Dict<{ episodes: number; success: Maybe<number>; reward: Maybe<number>; interval: Maybe<[number, number]> }>;
}

export interface Curves {
  train: Columns;
  validation: Validation[];
}

export interface Overview extends Card {
  path: string;
  problem_lines: string[];
  views: string[];
  results?: Maybe<Dict<any>[]>;
  training?: Maybe<Dict<any>>;
  activity?: Maybe<Dict<any>>;
  flow?: Maybe<Flow>;
  failures: Cause[];
  curves: Curves;
  staleness?: Dict<number>;
  pruned_steps?: number;
  settings: Maybe<Dict>;
  counts?: Maybe<Dict<number>>;
}

export interface Waiting {
  rollout_id: string;
  attempt_id?: string;
  tag: string;
  phase: string;
  name: string;
  agent: string;
  seconds: number;
  age: number;
  turns: number;
  worker: string;
}

export interface Worker {
  id: string;
  state: string;
  age: Maybe<number>;
  inflight: Maybe<number>;
  turns: Maybe<number>;
  tokens: Maybe<number>;
  waiting: Dict<number>;
  held_back: Maybe<string>;
}

export interface Held {
  rollout_id: string;
  status: string;
  attempt: Maybe<number>;
  most_attempts: number;
  worker: Maybe<string>;
  lease_expires: Maybe<number>;
  started: Maybe<number>;
  reason: Maybe<string>;
}

export interface StoreLook {
  problem?: string;
  now: number;
  counts: Dict<number>;
  attempts: Maybe<number>;
  workers: Worker[];
  held: Held[];
  held_total: number;
  episodes: Waiting[];
}

export interface Verdict {
  verdict: string;
  findings: { cause: string; because: string; advice: string }[];
  rollouts: number;
  shares: Dict<number>;
  figures: Dict<Maybe<number>>;
}

export interface Live {
  card: Card;
  state: string;
  now: number;
  age: Maybe<number>;
  snapshot: Maybe<Dict<any>>;
  last: Maybe<{ time: number; pid: number; host: string }>;
  flow: Maybe<Flow>;
  staleness: Dict<number>;
  failures: Cause[];
  activity: Maybe<Dict<any>>;
  verdict: Maybe<Verdict>;
  store?: Maybe<StoreLook>;
  problem_lines: string[];
}

export interface Row {
  number: number;
  rollout_id: string;
  group_id: string;
  tag: string;
  seed: number;
  reward: number;
  penalty: number;
  success: Maybe<number>;
  stop: Maybe<string>;
  turns: number;
  leaves: number;
  tokens: number;
  prompt_tokens: number;
  agents: string[];
  caught: string[];
  error: Maybe<string>;
  started: Maybe<number>;
  wall: number;
  oldest: Maybe<number>;
  newest: Maybe<number>;
  components: Dict<number>;
  hits?: { turn: number; before: string; match: string; after: string }[];
}

export interface Listing {
  rows: Row[];
  total: number;
  at_least: boolean;
  episodes: number;
  turns: number;
  indexed: number;
  tags: Dict<number>;
  stops: Dict<number>;
  caught: Dict<number>;
  agents: Dict<number>;
  notes: string[];
}

export interface ToolCall {
  id: string;
  name: string;
  arguments: string;
}

export interface Said {
  role: string;
  content: string;
  reasoning: string;
  name: Maybe<string>;
  tool_call_id: Maybe<string>;
  tool_calls: ToolCall[];
}

export interface Outcome {
  observation: string;
  reward: number;
  penalty: number;
  action: Maybe<string>;
  valid: boolean;
  success: Maybe<boolean>;
  terminated: boolean;
  truncated: boolean;
}

export interface Turn {
  id: number;
  after: Maybe<number>;
  extends: Maybe<number>;
  agent: string;
  text: string;
  finish: string;
  exact: boolean;
  prompt_tokens: number;
  tokens: number;
  count: number;
  versions: [number, number][];
  untrained: Maybe<string>;
  advantage: Maybe<number>;
  sampling: Maybe<string>;
  tool_calls: ToolCall[];
  outcome: Maybe<Outcome>;
}

export interface Episode {
  rollout_id: string;
  group_id: string;
  tag: string;
  seed: number;
  reward: number;
  penalty: number;
  episode_reward: number;
  components: Dict<number>;
  penalties: Dict<number>;
  success: Maybe<number>;
  stop: Maybe<string>;
  filtered: Maybe<string>;
  in_baseline: boolean;
  not_trainable: Maybe<string>;
  sampling: Maybe<string>;
  metrics: Dict<number>;
  error: Maybe<{ boundary: string; kind: string; message: string; turn: number }>;
  opening: Said[];
  observation: string;
  conversation: Said[];
  returned: Maybe<string>;
  turn_count: number;
  tokens: number;
  duration: number;
  worker: Maybe<string>;
  started: Maybe<number>;
  number: number;
  caught: string[];
  replaced: Maybe<string>;
  dropped: Maybe<string>;
  leaves: number;
  agents: string[];
  members: string[];
  previous: Maybe<string>;
  next: Maybe<string>;
  step: Maybe<{ mode: string; step: number; version: Maybe<number> }>;
  advantage_name: Maybe<string>;
  notes: string[];
  first_turn: number;
  turns: Turn[];
}

export interface Answer<T> {
  data: T | null;
  error: string | null;
  indexing: number | null;
}

export async function ask<T>(name: string, given: Dict<Maybe<string | number>>, signal?: AbortSignal): Promise<Answer<T>> {
  const query = new URLSearchParams();
  for (const [key, value] of Object.entries(given)) if (value !== null && value !== undefined && value !== "") query.set(key, String(value));
  let response: Response;
  try {
    response = await fetch(`/api/${name}?${query}`, signal ? { signal } : {});
  } catch (error) {
    if (signal?.aborted) throw error;
    return { data: null, error: "the server does not answer; is `rollwright ui` still running?", indexing: null };
  }
  if (response.status === 401 || response.status === 403) {
    return { data: null, error: "a token is needed: open the address that `rollwright ui` has printed", indexing: null };
  }
  let content: any;
  try {
    content = await response.json();
  } catch {
    return { data: null, error: `the server answered ${response.status}`, indexing: null };
  }
  if (response.status === 202) return { data: null, error: null, indexing: content.indexing };
  if (!response.ok) return { data: null, error: content.error ?? `the server answered ${response.status}`, indexing: null };
  return { data: content as T, error: null, indexing: null };
}

const INDEXING_PAUSE = 300;

/** The answer to a question, asked again every `every` milliseconds while the page is visible; 0: once. */
export function useAsk<T>(name: string, given: Dict<Maybe<string | number>>, every = 0): Answer<T> & { again: () => void } {
  const [answer, setAnswer] = useState<Answer<T>>({ data: null, error: null, indexing: null });
  const [round, setRound] = useState(0);
  const key = name + JSON.stringify(given);
  const shown = useRef(key);
  useEffect(() => {
    const abort = new AbortController();
    let timer = 0;
    if (shown.current !== key) {
      shown.current = key;
      setAnswer({ data: null, error: null, indexing: null });
    }
    const look = async () => {
      if (every && document.hidden) {
        timer = window.setTimeout(look, every);
        return;
      }
      try {
        const found = await ask<T>(name, given, abort.signal);
        if (abort.signal.aborted) return;
        setAnswer((before) => (found.data === null && every && found.error ? { ...found, data: before.data } : found));
        const pause = found.indexing !== null ? INDEXING_PAUSE : every;
        if (pause) timer = window.setTimeout(look, pause);
      } catch {
        /* aborted: another question has taken its place */
      }
    };
    look();
    return () => {
      abort.abort();
      window.clearTimeout(timer);
    };
  }, [key, every, round]);
  return { ...(shown.current === key ? answer : { data: null, error: null, indexing: null }), again: () => setRound((n) => n + 1) };
}
