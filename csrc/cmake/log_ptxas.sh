#!/bin/sh
# log_ptxas.sh nvcc ARGUMENTS...: runs the compiler, and moves ptxas' report (registers, spills) from the terminal to
# OBJECT.ptxas.log beside the object file. Everything else that the compiler says stays on the terminal.
set -u
object=
previous=
for argument in "$@"; do
  [ "$previous" = -o ] && object=$argument
  previous=$argument
done
case $object in
  *.o) ;;
  *) exec "$@" ;; # CMake's own compiler checks
esac
report=$object.ptxas.log
"$@" 2>"$report"
status=$?
grep -vE '^ptxas info|^ +[0-9]+ bytes stack frame|^$' "$report" >&2
exit $status
