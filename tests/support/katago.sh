#!/bin/sh
# Speaks the protocol of `katago analysis`, with what a test needs: a question's "rules" may be slow, bad, crash,
# chatty or warn. Several turns get several answers.
field() { printf '%s' "$1" | sed -n "s/.*\"$2\":\"\([^\"]*\)\".*/\1/p"; }
[ -f "/app/refuse" ] && { echo "CUDA error: out of memory" >&2; exit 3; }
echo "KataGo Analysis Engine starting..." >&2
while read -r line; do
  id=$(field "$line" id)
  case "$line" in
    *'"action":"query_version"'*)
      echo "Started, ready to begin handling requests" >&2
      echo "{\"action\":\"query_version\",\"id\":\"$id\",\"version\":\"1.15.3\"}" ;;
    *'"action":"terminate"'*)
      target=$(field "$line" terminateId)
      echo "{\"action\":\"terminate\",\"id\":\"$id\",\"isDuringSearch\":false,\"terminateId\":\"$target\"}"
      echo "{\"id\":\"$target\",\"isDuringSearch\":false,\"noResults\":true,\"turnNumber\":0}" ;;
    *'"rules":"slow"'*)
      echo "{\"id\":\"$id\",\"isDuringSearch\":true,\"turnNumber\":0}" ;;
    *'"rules":"bad"'*)
      echo "{\"error\":\"Could not parse rules: bad\",\"field\":\"rules\",\"id\":\"$id\"}" ;;
    *'"rules":"crash"'*)
      echo "terminate called after throwing an instance of 'StringError'" >&2; exit 134 ;;
    *'"analyzeTurns":[0,1]'*)
      echo "{\"id\":\"$id\",\"isDuringSearch\":false,\"turnNumber\":1,\"rootInfo\":{\"visits\":2}}"
      echo "{\"id\":\"$id\",\"isDuringSearch\":false,\"turnNumber\":0,\"rootInfo\":{\"visits\":2}}" ;;
    *)
      echo "{\"id\":\"$id\",\"warning\":\"Unused field\",\"field\":\"x\"}"
      echo "{\"id\":\"$id\",\"isDuringSearch\":true,\"turnNumber\":0,\"rootInfo\":{\"visits\":1}}"
      echo "{\"id\":\"$id\",\"isDuringSearch\":false,\"turnNumber\":0,\"rootInfo\":{\"visits\":8}}" ;;
  esac
done
