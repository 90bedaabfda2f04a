"""The same methods over a real network: a Flower ServerApp and ClientApp (`perada.flower.app`).

Flower carries messages. Everything that it does not promise is done here: a site's own state on its disk
(`site_state`), rounds that close at a deadline (`cohort`) and continue after a crash (`server`), the check of every
upload (`messages`).
"""
