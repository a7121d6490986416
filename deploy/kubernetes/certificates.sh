#!/usr/bin/env bash
# Makes an authority and certificates for the coordinator, one admin and the given nodes, for Kubernetes or bare metal. Run
# again with more nodes it keeps what is there and adds what is missing.
#
#   deploy/kubernetes/certificates.sh FOLDER NAME=IP...        e.g. certificates.sh tls gpu-01=10.0.3.11 gpu-02=10.0.3.12
#
# FOLDER then holds ca.crt and ca.key (keep it off the cluster), coordinator.{crt,key}, admin.{crt,key}, and nodes/ with
# ca.crt and NAME.{crt,key}. docs/kubernetes.md says which Secrets they become.
set -euo pipefail
(($# >= 1)) || { sed -n '2,/^set/s/^# \{0,1\}//p' "$0" >&2; exit 2; }
folder=$1
shift
days=${RINGLEADER_CERTIFICATE_DAYS:-365}
umask 077
mkdir -p "$folder/nodes"

new_key() { openssl genpkey -algorithm EC -pkeyopt ec_paramgen_curve:P-256 -out "$1"; }

# sign NAME SUBJECT ALTERNATIVE-NAMES: NAME.key and NAME.crt, unless they are there.
sign() {
  local name=$1 subject=$2 names=$3
  [[ ! -e $folder/$name.crt ]] || return 0
  new_key "$folder/$name.key"
  openssl req -new -key "$folder/$name.key" -subj "/CN=$subject" |
    openssl x509 -req -days "$days" -CA "$folder/ca.crt" -CAkey "$folder/ca.key" -CAcreateserial -out "$folder/$name.crt" \
      -extfile <(printf 'subjectAltName=%s\nextendedKeyUsage=clientAuth,serverAuth\n' "$names") 2>/dev/null
}

if [[ ! -e $folder/ca.crt ]]; then
  new_key "$folder/ca.key"
  openssl req -x509 -new -key "$folder/ca.key" -days 3650 -subj "/CN=Ringleader authority" \
    -addext basicConstraints=critical,CA:TRUE -addext keyUsage=critical,keyCertSign,cRLSign -out "$folder/ca.crt"
fi
sign coordinator ringleader-coordinator \
  DNS:localhost,DNS:ringleader-coordinator,DNS:ringleader-coordinator.ringleader.svc,IP:127.0.0.1
sign admin admin URI:ringleader://admin/admin
cp "$folder/ca.crt" "$folder/nodes/ca.crt"
for node in "$@"; do
  name=${node%%=*} ip=${node#*=}
  [[ $node == *=* && $name =~ ^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$ && $ip ]] ||
    { echo "certificates: $node is not NAME=IP" >&2; exit 2; }
  sign "nodes/$name" "$name" "DNS:$name,IP:$ip,URI:ringleader://node/$name"
done
