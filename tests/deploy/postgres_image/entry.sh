#!/bin/bash
# What the entry point of the official image does with what deploy/compose.yaml gives it.
set -e
if [ ! -s "$PGDATA/PG_VERSION" ]; then
    # shellcheck disable=SC2086  # a list
    initdb --username="$POSTGRES_USER" --pwfile="$POSTGRES_PASSWORD_FILE" $POSTGRES_INITDB_ARGS
    echo "host all all all scram-sha-256" >>"$PGDATA/pg_hba.conf"
    pg_ctl --wait --options="-c listen_addresses=" start
    createdb --username="$POSTGRES_USER" "$POSTGRES_DB"
    for file in /docker-entrypoint-initdb.d/*; do
        # shellcheck disable=SC1090
        . "$file"
    done
    pg_ctl --wait stop
fi
exec postgres -c listen_addresses='*'
