"""The same methods over a real network: a Flower ServerApp and ClientApp (`perada.flower.app`).

Flower carries messages; everything it does not promise is done here: a site's own state on its disk (`site`), rounds
that close at a deadline and go on after a crash (`server`), the check of every upload (`messages`).
"""
