#!/bin/sh
# Makes an authority and the server's certificate in certs/, and overwrites nothing.
# Give a --server-name for every name and address that sites dial.
# Each site makes its own key, also a site on this machine:
#   perada flower certs certs --keys-only --sites NAME      and sends certs/sites/NAME.pub to the server's certs/sites/
set -eu
cd "$(dirname "$0")"
exec perada flower certs certs --server-name {{ server.host }} "$@"
