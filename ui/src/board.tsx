// Boards of grid games, drawn from the text that the environment shows. A text is a board where several lines in a row have
// the same length and hold nothing but the symbols of one game.
type Cells = Record<string, [shape: string, meaning: string]>;

const GAMES: Cells[] = [
  {
    P: ["player", "the player"],
    _: ["ice", "safe ice"],
    O: ["hole", "a hole"],
    G: ["goal", "the goal"],
    X: ["fallen", "the player in a hole"],
    "√": ["done", "the player on the goal"],
  },
  {
    "#": ["wall", "a wall"],
    _: ["floor", "free floor"],
    O: ["target", "a target"],
    "√": ["placed", "a box on a target"],
    X: ["box", "a box"],
    P: ["player", "the player"],
    S: ["player on", "the player on a target"],
  },
  {
    W: ["wall", "a wall"],
    ".": ["floor", "free floor"],
    G: ["target", "a target"],
    C: ["placed", "a box on a target"],
    B: ["box", "a box"],
    A: ["player", "the player"],
    "@": ["player on", "the player on a target"],
  },
  {
    "#": ["wall", "a wall"],
    " ": ["floor", "free floor"],
    "-": ["floor", "free floor"],
    ".": ["target", "a target"],
    "*": ["placed", "a box on a target"],
    $: ["box", "a box"],
    "@": ["player", "the player"],
    "+": ["player on", "the player on a target"],
  },
];
const FEWEST = 3;
const MOST = 40;

export interface Found {
  before: string;
  lines: string[];
  after: string;
}

function gameOf(lines: string[]): Cells | null {
  const symbols = new Set(lines.join(""));
  const players = [...symbols].some((each) => "PXS√A@+".includes(each));
  return players && symbols.size > 1 ? (GAMES.find((game) => [...symbols].every((each) => each in game)) ?? null) : null;
}

export function boardIn(text: string): Found | null {
  if (text.length > 20000) return null;
  const lines = text.split("\n");
  for (let start = 0; start < lines.length; start++) {
    const width = [...lines[start]!].length;
    if (width < FEWEST || width > MOST) continue;
    let end = start;
    while (end < lines.length && [...lines[end]!].length === width) end++;
    const rows = lines.slice(start, end);
    if (rows.length >= FEWEST && rows.length <= MOST && gameOf(rows)) {
      return { before: lines.slice(0, start).join("\n"), lines: rows, after: lines.slice(end).join("\n") };
    }
    start = end - 1;
  }
  return null;
}

const SIZE = 22;

export function Board({ lines, small = false }: { lines: string[]; small?: boolean }) {
  const rows = lines.map((line) => [...line]);
  const width = rows[0]!.length;
  const game = gameOf(lines) ?? {};
  return (
    <svg
      class={small ? "board small" : "board"}
      viewBox={`0 0 ${width * SIZE} ${rows.length * SIZE}`}
      style={{ width: `${width * (small ? 14 : SIZE)}px` }}
      role="img"
      aria-label={`board, ${rows.length} by ${width}: ${lines.join(" / ")}`}
    >
      {rows.map((row, y) => row.map((cell, x) => <Cell key={`${x} ${y}`} x={x} y={y} cell={cell} game={game} />))}
    </svg>
  );
}

function Cell({ x, y, cell, game }: { x: number; y: number; cell: string; game: Cells }) {
  const [shape, meaning] = game[cell] ?? ["floor", cell];
  const kind = shape.split(" ")[0];
  return (
    <g transform={`translate(${x * SIZE} ${y * SIZE})`} class={`cell ${shape}`}>
      <title>{meaning}</title>
      <rect width={SIZE} height={SIZE} />
      {(kind === "target" || kind === "placed" || shape === "player on") && <circle class="ring" cx="11" cy="11" r="8" />}
      {kind === "player" && <circle class="piece" cx="11" cy="11" r="6" />}
      {(kind === "box" || kind === "placed") && <rect class="piece" x="4.5" y="4.5" width="13" height="13" rx="2.5" />}
      {kind === "goal" && <path class="piece" d="M7 18V4l9 3.5-9 3.5" />}
      {kind === "hole" && <ellipse class="piece" cx="11" cy="11" rx="8" ry="7" />}
      {kind === "fallen" && <path class="piece" d="M5 5l12 12M17 5L5 17" />}
      {kind === "done" && <path class="piece" d="M5 11.5l4 4 8-9" />}
    </g>
  );
}
