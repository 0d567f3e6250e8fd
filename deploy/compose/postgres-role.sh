# The role that gateways connect as; the image's own entry point reads this once, when it makes the database.
# What the role may do with each table is granted when the tables are made (`appliance audit upgrade-database`).
psql --set=ON_ERROR_STOP=1 --username="$POSTGRES_USER" --dbname="$POSTGRES_DB" \
    --set=password="$(cat /run/secrets/database-gateway-password)" <<'SQL'
CREATE ROLE gateway LOGIN PASSWORD :'password';
REVOKE ALL ON SCHEMA public FROM PUBLIC;
GRANT USAGE ON SCHEMA public TO gateway;
SQL
