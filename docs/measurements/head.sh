# Sourced by the measurement scripts: prints date, machine, load, program version and NOTE. `moe_analyze` must be the path of the program.
# COMMIT replaces the commit if there is no git repository.

echo "date       $(date -u +%F)"
echo "machine    $(lscpu | sed -n 's/^Model name: *//p' | head -1), $(nproc) CPUs, $(uname -sr)"
echo "load       $(cut -d' ' -f1-3 /proc/loadavg)"
echo "program    $("$moe_analyze" --version), commit ${COMMIT:-$(git rev-parse --short HEAD 2>/dev/null || echo unknown)}"
[ -z "${NOTE:-}" ] || echo "note       $NOTE"
