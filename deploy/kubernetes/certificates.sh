#!/usr/bin/env bash
# Makes and renews an authority's certificates for the coordinator, one admin and the given nodes, for Kubernetes or bare
# metal. A certificate that is there stays, unless its names or addresses are others now, its end is near, it does not
# belong to its key or another authority signed it: then it is signed again, with a new key. A line says what was done to each.
#
#   deploy/kubernetes/certificates.sh FOLDER [--coordinator NAME|IP[,...]] [NAME=IP...]
#   e.g. certificates.sh tls --coordinator head.example,10.0.3.1 gpu-01=10.0.3.11 gpu-02=10.0.3.12
#
# --coordinator names where workers and people reach the coordinator, beyond localhost and its Service in Kubernetes; a later
# call without it keeps these names, and one with it replaces them.
#
# FOLDER then holds ca.crt and ca.key (keep it off the cluster), coordinator.{crt,key}, admin.{crt,key}, and nodes/ with
# ca.crt and NAME.{crt,key}. Nodes of an earlier call that are not named keep their addresses, and are renewed, too.
# docs/kubernetes.md says which Secrets they become, and how to renew the authority itself.
#
#   RINGLEADER_CERTIFICATE_DAYS   how long a certificate is valid (default: 365)
#   RINGLEADER_RENEW_DAYS         the end is near when it is no more days away (default: an eighth of the above, so that what the
#                                 alert RingleaderCertificateExpires is on, with a tenth of its time left, is signed again)
set -euo pipefail
case ${1:-} in
  '') sed -n '2,/^set/s/^# \{0,1\}//p' "$0" >&2; exit 2 ;;
  -h | --help) sed -n '2,/^set/s/^# \{0,1\}//p' "$0"; exit ;;
  -*) echo "certificates: unknown option $1 (see --help)" >&2; exit 2 ;;
esac
fail() { echo "certificates: $*" >&2; exit 1; }
folder=$1
shift
number_of_days() { [[ $1 =~ ^(0|[1-9][0-9]{0,4})$ ]] || fail "$1 is no number of days"; }
days=${RINGLEADER_CERTIFICATE_DAYS:-365}
number_of_days "$days"
renew_days=${RINGLEADER_RENEW_DAYS:-$(((days + 7) / 8))}
number_of_days "$renew_days"
((days > renew_days)) || fail "certificates of $days days would be renewed at each call, $renew_days days before their end"
nodes=() coordinator_names=''
while (($# > 0)); do
  case $1 in
    --coordinator)
      [[ ${2:-} ]] || { echo "certificates: --coordinator needs NAME or IP (see --help)" >&2; exit 2; }
      coordinator_names=$2
      shift ;;
    --coordinator=?*) coordinator_names=${1#*=} ;;
    -*) echo "certificates: unknown option $1 (see --help)" >&2; exit 2 ;;
    *) nodes+=("$1") ;;
  esac
  shift
done
# The coordinator's names as openssl takes them: always, and further ones.
always=DNS:localhost,DNS:ringleader-coordinator,DNS:ringleader-coordinator.ringleader.svc,IP:127.0.0.1 further=''
IFS=, read -r -a given <<<"$coordinator_names"
for name in "${given[@]}"; do
  if [[ $name =~ ^[0-9.]+$ || $name =~ ^[0-9a-fA-F:]*:[0-9a-fA-F:.]*$ ]]; then
    name=IP:$name
  elif [[ $name =~ ^[a-zA-Z0-9]([-a-zA-Z0-9.]*[a-zA-Z0-9])?$ ]]; then
    name=DNS:$name
  else
    echo "certificates: --coordinator: '$name' is neither a host's name nor an IP address" >&2
    exit 2
  fi
  [[ ,$always$further, == *",$name,"* ]] || further+=,$name
done
for node in "${nodes[@]}"; do
  name=${node%%=*} address=${node#*=}
  [[ $node == *=* && $name =~ ^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$ && $address =~ ^[0-9a-fA-F.:]+$ ]] ||
    { echo "certificates: $node is not NAME=IP" >&2; exit 2; }
  [[ $name != ca ]] || { echo "certificates: a node cannot be called ca: nodes/ca.crt is the authority's" >&2; exit 2; }
done
umask 077
mkdir -p "$folder/nodes"
work=$(mktemp -d "$folder/.new.XXXXXX")
trap 'rm -rf "$work"' EXIT

# quietly WHAT COMMAND...: its own words only where it fails.
quietly() {
  local what=$1 words
  shift
  words=$("$@" 2>&1) || fail "$what: openssl says: $words"
}
new_key() { quietly "$1" openssl genpkey -algorithm EC -pkeyopt ec_paramgen_curve:P-256 -out "$1"; }
end_of() { openssl x509 -in "$1" -noout -enddate | cut -d= -f2; }
names_in() { openssl x509 -in "$1" -noout -ext subjectAltName | sed '1d; s/^ *//; s/IP Address:/IP:/g; s/, */,/g'; }
public_key() { openssl "$@" 2>&1 || true; }

# reason NAME: why NAME.crt has to be signed again, now that $work/crt has the names that it ought to have; nothing if it has not.
reason() {
  local name=$1
  [[ -e $folder/$name.crt && -e $folder/$name.key ]] || { echo "new"; return; }
  if [[ $(public_key x509 -in "$folder/$name.crt" -noout -pubkey) != "$(public_key pkey -in "$folder/$name.key" -pubout)" ]]; then
    echo "it did not belong to its key"
  elif ! openssl x509 -in "$folder/$name.crt" -noout -checkend 0 >/dev/null; then
    echo "it ended on $(end_of "$folder/$name.crt")"
  elif ! openssl x509 -in "$folder/$name.crt" -noout -checkend $((renew_days * 86400)) >/dev/null; then
    echo "it would have ended on $(end_of "$folder/$name.crt")"
  elif ! openssl verify -CAfile "$folder/ca.crt" "$folder/$name.crt" >/dev/null 2>&1; then
    echo "another authority had signed it"
  elif [[ $(names_in "$folder/$name.crt") != "$(names_in "$work/crt")" ]]; then
    echo "its names were $(names_in "$folder/$name.crt")"
  fi
}

# sign NAME SUBJECT ALTERNATIVE-NAMES: NAME.key and NAME.crt, where those that are there will not do. Of a subject that
# is longer than X.509 allows the beginning is taken: the other names decide.
sign() {
  local name=$1 subject=$2 names=$3 why
  new_key "$work/key"
  quietly "$name" openssl req -new -key "$work/key" -subj "/CN=${subject:0:64}" -out "$work/csr"
  printf 'subjectAltName=%s\nextendedKeyUsage=clientAuth,serverAuth\n' "$names" >"$work/extensions"
  quietly "$name ($names)" openssl x509 -req -days "$days" -in "$work/csr" -CA "$folder/ca.crt" -CAkey "$folder/ca.key" \
    -CAcreateserial -extfile "$work/extensions" -out "$work/crt"
  why=$(reason "$name")
  if [[ $why ]]; then
    # A call that is broken off between the two is mended by the next, which looks whether they belong together.
    mv "$work/key" "$folder/$name.key"
    mv "$work/crt" "$folder/$name.crt"
    echo "certificates: $name: signed, valid until $(end_of "$folder/$name.crt") ($why)"
  else
    echo "certificates: $name: kept, valid until $(end_of "$folder/$name.crt")"
  fi
}

if [[ ! -e $folder/ca.crt ]]; then
  new_key "$folder/ca.key"
  quietly "the authority" openssl req -x509 -new -key "$folder/ca.key" -days 3650 -subj "/CN=Ringleader authority" \
    -addext basicConstraints=critical,CA:TRUE -addext keyUsage=critical,keyCertSign,cRLSign -out "$work/ca.crt"
  mv "$work/ca.crt" "$folder/ca.crt"
  echo "certificates: ca: signed, valid until $(end_of "$folder/ca.crt") (new)"
fi
[[ -e $folder/ca.key ]] || fail "$folder/ca.key is not there, without which nothing can be signed"
openssl x509 -in "$folder/ca.crt" -noout -checkend 0 >/dev/null ||
  fail "the authority $folder/ca.crt ended on $(end_of "$folder/ca.crt"): docs/kubernetes.md says how to take another"
openssl x509 -in "$folder/ca.crt" -noout -checkend $((days * 86400)) >/dev/null ||
  echo "certificates: the authority ends on $(end_of "$folder/ca.crt"), before what it signs: docs/kubernetes.md says how to take another" >&2
if [[ ! $coordinator_names && -e $folder/coordinator.crt ]]; then
  IFS=, read -r -a kept <<<"$(names_in "$folder/coordinator.crt")"
  for name in "${kept[@]}"; do
    [[ $name != DNS:* && $name != IP:* || ,$always, == *",$name,"* ]] || further+=,$name
  done
fi
sign coordinator ringleader-coordinator "$always$further"
sign admin admin URI:ringleader://admin/admin
cp "$folder/ca.crt" "$folder/nodes/ca.crt"
declare -A named=()
for node in "${nodes[@]}"; do
  name=${node%%=*}
  named[$name]=1
  sign "nodes/$name" "$name" "DNS:$name,IP:${node#*=},URI:ringleader://node/$name"
done
for file in "$folder"/nodes/*.crt; do
  name=$(basename "$file" .crt)
  [[ $name == ca || ${named[$name]:-} ]] || sign "nodes/$name" "$name" "$(names_in "$file")"
done
