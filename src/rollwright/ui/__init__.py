"""The page to look at runs: a read-only server over run folders and stores, and its front end."""
