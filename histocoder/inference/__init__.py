"""From descriptions to codes: the public `Coder`, whole files, the ways of decoding, and how sure an answer is."""
