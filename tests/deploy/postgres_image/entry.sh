#!/bin/bash
# What the entry point of the official image does with what deploy/compose.yaml and the chart give it.
set -e
if [ ! -s "$PGDATA/PG_VERSION" ]; then
    # shellcheck disable=SC2086  # a list
    initdb --username="$POSTGRES_USER" --pwfile="$POSTGRES_PASSWORD_FILE" $POSTGRES_INITDB_ARGS
    echo "host all all all scram-sha-256" >>"$PGDATA/pg_hba.conf"
    pg_ctl --wait --options="-c listen_addresses=" start
    createdb --username="$POSTGRES_USER" "$POSTGRES_DB"
    for file in /docker-entrypoint-initdb.d/*; do
        case "$file" in
            *.sql)
                psql --no-psqlrc --set=ON_ERROR_STOP=1 --username="$POSTGRES_USER" --dbname="$POSTGRES_DB" --file="$file"
                ;;
            *)
                # shellcheck disable=SC1090
                . "$file"
                ;;
        esac
    done
    pg_ctl --wait stop
fi
exec postgres -c listen_addresses='*'
