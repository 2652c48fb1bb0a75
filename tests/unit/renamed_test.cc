// Old words (docs/words.md): a strategy that uses one is refused with its successor, older graph files are translated.
#include <doctest/doctest.h>

#include "caught.h"
#include "ir/renamed_options.h"
#include "task/strategy.h"

namespace whale {

TEST_CASE("renamed options of a strategy are refused, and the new name is said") {
  const auto said = [](const char* strategy) { return message_of([&] { parse_strategy(strategy); }); };
  CHECK(said("pipeline(2, chunks=2)") ==
        "strategy 'pipeline(2, chunks=2)': parameter 'chunks' of pipeline is called 'virtual_stages' now");
  CHECK(has(said("cluster(layout=row) > replica"), "'layout' of cluster is called 'device_order' now"));
  CHECK(has(said("replica(2, layout=column)"), "'layout' of replica is called 'device_order' now"));
  CHECK(has(said("split(2, layout=row)"), "split has no parameter 'layout'"));
  CHECK(has(said("replica(2, chunks=2)"), "replica has no parameter 'chunks'"));
}

TEST_CASE("renamed options of a strategy in an older file are translated, and nothing else of it") {
  const auto same = [](const char* strategy) { CHECK(with_renamed_options(strategy) == strategy); };
  CHECK(with_renamed_options("cluster( layout = row) > pipeline(2, schedule=interleaved, chunks=3) > split(2)") ==
        "cluster( device_order = row) > pipeline(2, schedule=interleaved, virtual_stages=3) > split(2)");
  CHECK(with_renamed_options("head: replica(layout=[[0,1],[2]], by=sample); cluster(\"cpu:4\", layout=average(2))") ==
        "head: replica(device_order=[[0,1],[2]], by=sample); cluster(\"cpu:4\", device_order=average(2))");
  for (const char* strategy :
       {"", "replica(3, shares=[3,2,1])", "layout: replica(2); chunks: split(2)", "split(2, factor='layout=')",
        "split(2, layout=row)", "chunks=2", "pipeline(2, \"chunks=2\")", "pipeline(chunks)", "pipeline(2, chunks"})
    same(strategy);
}

}  // namespace whale
