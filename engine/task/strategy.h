// Strategies as text (semantics.md section 3): "replica(3, shares=[3,2,1]) > pipeline(4, micro_batches=8) > split(2)",
// the outer scope first.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "ir/graph.h"

namespace whale {

std::vector<Scope> parse_strategy(std::string_view text);  // throws with the position and what was expected
// "[pipeline(3), split(2)]": what each of unlike replicas has inside (Scope::nests), two or more.
std::vector<std::vector<Scope>> parse_nests(std::string_view list);

// Several nests in one text: "backbone: replica(2); classifier: split(2); replica(2)". A clause with a name is for the
// ops inside name scopes of that name (or path, "encoder/block0"), the one without for all others.
struct StrategyClause {
  std::string name;  // empty: everything else
  std::vector<Scope> nest;
};
std::vector<StrategyClause> parse_clauses(std::string_view text);
// A clause for a scope that the graph does not have would be without effect: an error.
void check_clauses(const Graph& graph, const std::vector<StrategyClause>& clauses);

// Whether the model says itself how ops are cut; an order of its devices (`cluster`) alone does not.
bool is_annotated(const Graph& graph);

std::string to_string(const Scope& scope);              // "replica(2)"; parameters at their defaults are left out
std::string to_string(const std::vector<Scope>& nest);  // parses to the same list
const char* name_of(ScopeKind kind);                    // "replica", "split", ...

}  // namespace whale
