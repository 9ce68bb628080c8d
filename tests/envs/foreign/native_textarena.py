"""TextArena's own loop, as its documentation has it, over scripted moves: what our rewards are compared with."""

import json
import random
import re
import sys

import textarena

game, seat, players, episodes = json.load(sys.stdin)


def listed(text: str) -> str:
    return re.findall(r"\[[^\[\]\n]{1,24}\]", re.findall(r"Available Moves:(.*)", text)[-1])[0]


results = []
for seed, moves in episodes:
    random.seed(seed)
    env = textarena.make(game)
    env.reset(num_players=players, seed=seed)
    mine, done = iter(moves), False
    while not done:
        player, observation = env.get_observation()
        move = next(mine, None) if player == seat else listed("\n".join(each[1] for each in observation))
        if move is None:
            break
        done, _ = env.step(action=move)
    rewards, _ = env.close()
    results.append((done, float((rewards or {}).get(seat, 0.0)) if done else 0.0))
json.dump(results, sys.stdout)
