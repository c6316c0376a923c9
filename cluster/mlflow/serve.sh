#!/bin/sh
# Starts the MLflow server with the passwords of /run/secrets, which never stand on a command line.
set -eu

secret() {
    if [ ! -s "/run/secrets/$1" ]; then
        echo "the secret $1 is missing or empty; see compose.yaml" >&2
        exit 1
    fi
    cat "/run/secrets/$1"
}

umask 077
password="$(secret postgres_password)"
admin="$(secret mlflow_admin_password)"
MLFLOW_FLASK_SERVER_SECRET_KEY="$(secret mlflow_secret_key)"
MLFLOW_BACKEND_STORE_URI="postgresql://mlflow:$password@postgres:5432/mlflow"
MLFLOW_AUTH_CONFIG_PATH=/tmp/basic_auth.ini
export MLFLOW_FLASK_SERVER_SECRET_KEY MLFLOW_BACKEND_STORE_URI MLFLOW_AUTH_CONFIG_PATH
export MLFLOW_DISABLE_TELEMETRY=true
cat >"$MLFLOW_AUTH_CONFIG_PATH" <<TEXT
[mlflow]
default_permission = READ
database_uri = $MLFLOW_BACKEND_STORE_URI
admin_username = admin
admin_password = $admin
authorization_function = mlflow.server.auth:authenticate_request_basic_auth
TEXT
exec mlflow server --host 0.0.0.0 --port 5000 --app-name basic-auth --serve-artifacts
