"""Harbor task folders as an environment: `harbor:PATH` plays one task, or every task in a folder."""
