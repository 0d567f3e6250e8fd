# Creates the role of the gateways; the image's entry point runs this once, when it creates the database.
# `appliance audit upgrade-database` grants the role's rights on each table.
psql --set=ON_ERROR_STOP=1 --username="$POSTGRES_USER" --dbname="$POSTGRES_DB" \
    --set=password="$(cat /run/secrets/database-gateway-password)" <<'SQL'
CREATE ROLE gateway LOGIN PASSWORD :'password';
REVOKE ALL ON SCHEMA public FROM PUBLIC;
GRANT USAGE ON SCHEMA public TO gateway;
SQL
