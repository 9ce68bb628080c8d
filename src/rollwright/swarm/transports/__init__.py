"""How nodes reach each other: one contract (`base`), and the networks that keep it."""
