#!/bin/sh
# From loaded images to a first answer: start.sh [PROFILE...], as root.  Default: demo.
#
# Repeating it starts what is not running; secrets, tenants and keys stay.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
deploy=$(dirname "$here")
[ $# -gt 0 ] || set -- demo
minutes=${START_MINUTES:-30}

if docker compose version >/dev/null 2>&1; then
    command="docker compose"
elif command -v docker-compose >/dev/null; then
    command="docker-compose"
else
    echo "start.sh: neither 'docker compose' nor 'docker-compose' is installed: install one of them" >&2
    exit 1
fi
if [ "$(id -u)" -ne 0 ]; then
    echo "start.sh: it makes secrets that only root and the containers read: run it as root" >&2
    exit 1
fi
profiles=
for profile in "$@"; do profiles="$profiles --profile $profile"; done
compose() {
    # shellcheck disable=SC2086 # words on purpose
    $command --file "$deploy/compose.yaml" $profiles "$@"
}
in_gateway() { compose exec -T gateway "$@" </dev/null; }

sh "$here/secrets.sh" "${APPLIANCE_SECRETS:-$deploy/secrets}"
secrets=$(cd "${APPLIANCE_SECRETS:-$deploy/secrets}" && pwd)

# Compose 1.29 would ask a registry for an image that is missing, and lists the services of all profiles.
wanted() {
    compose config | awk -v profiles=" $* " '
        function show() { if (image != "" && (!limited || chosen)) print image; image = ""; limited = chosen = 0 }
        /^[^ ]/ { show(); services = ($0 == "services:") }
        services && /^  [^ ]/ { show() }
        services && /^    [a-z_]+:/ { list = ($1 == "profiles:") }
        services && /^    image:/ { image = $2 }
        services && list && $1 == "-" { limited = 1; if (index(profiles, " " $2 " ")) chosen = 1 }
        END { show() }' | sort -u
}
missing=$(wanted "$@" | while read -r image; do
    docker image inspect "$image" >/dev/null 2>&1 || printf ' %s' "$image"
done)
if [ -n "$missing" ]; then
    echo "start.sh: images are missing:$missing; load them: docker load --input images.tar" >&2
    exit 1
fi

case " $* " in
*" postgres "*) compose run --rm database ;;
esac
compose up --detach

echo "waiting until the appliance is ready, at most $minutes minutes"
until=$(($(date +%s) + minutes * 60))
said=
while ! now=$(in_gateway /opt/appliance/bin/python -I /opt/appliance/healthcheck.py 8080 /readyz 2>/dev/null); do
    if [ -n "$now" ] && [ "$now" != "$said" ]; then
        said=$now
        echo "not ready: $now"
    fi
    if [ "$(date +%s)" -ge "$until" ]; then
        echo "start.sh: not ready after $minutes minutes: read $command --file $deploy/compose.yaml logs" >&2
        exit 1
    fi
    sleep 2
done

key=$secrets/demo.key
if [ ! -s "$key" ]; then
    in_gateway appliance tenant create demo --config /etc/appliance/appliance.yaml >/dev/null 2>&1 || true
    (umask 077; in_gateway appliance key create demo --config /etc/appliance/appliance.yaml >"$key.new")
    mv "$key.new" "$key"
    echo "made $key: the key of the tenant demo"
fi

# Over loopback, where the certificate's name is not compared.
found=$(compose exec -T gateway /opt/appliance/bin/python -I -c '
import json, ssl, sys, urllib.request
headers = {"Authorization": "Bearer " + sys.stdin.read().strip()}
for scheme in ("http", "https"):
    asked = urllib.request.Request(scheme + "://127.0.0.1:8080/v1/models", headers=headers)
    try:
        answer = urllib.request.urlopen(asked, timeout=30, context=ssl._create_unverified_context())
    except OSError:
        continue
    print(scheme, json.load(answer)["data"][0]["id"])
    break
' <"$key")
address=$(compose port ingress 8080)
cat <<EOF

ready    ${found%% *}://$address/v1  (model: ${found#* })

curl ${found%% *}://$address/v1/chat/completions -H "Authorization: Bearer \$(cat $key)" \\
  -H 'Content-Type: application/json' \\
  -d '{"model": "${found#* }", "max_tokens": 64, "temperature": 0, "messages": [{"role": "user", "content": "Write a Python function \`get_name\`."}]}'

docs     ${found%% *}://$address/docs
console  http://$(compose port admin 8081)/console, with the admin key:
         $command --file $deploy/compose.yaml exec gateway cat /var/lib/appliance/admin.key
EOF
