#!/bin/sh
# Sends generated requests to a running server and compares its responses with schemas/openapi.json.
#
#     schemathesis.sh URL [KEY]
#
# The program schemathesis must be in PATH; its version is in tests/requirements.txt.
set -eu

url=$1
key=${2:-}
schema=$(dirname "$0")/../../schemas/openapi.json

set -- run "$schema" --url "$url" --checks all --seed 1 --max-examples 50 --workers 1 --no-color
if [ -n "$key" ]; then
    set -- "$@" --header "Authorization: Bearer $key"
fi
exec schemathesis "$@"
