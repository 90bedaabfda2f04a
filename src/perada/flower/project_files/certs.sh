#!/bin/sh
# Makes an authority and the server's certificate in certs/, and overwrites nothing.
# Give a --server-name for every name and address that sites dial.
{% set local = "All sites are on this machine, so it makes their keys too. Elsewhere each" %}
# {{ local if server.loopback else "Each" }} site makes its own key:
#   perada flower certs certs --keys-only --sites NAME      and sends certs/sites/NAME.pub to the server's certs/sites/
set -eu
cd "$(dirname "$0")"
exec perada flower certs certs --server-name {{ server.host }}{{ " --sites " ~ sites | join(",") if server.loopback }} "$@"
