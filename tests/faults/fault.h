// Faults: damages of plans, each at a random place of a random plan. What the plan verifier and `whale verify` are
// measured by (docs/equality.md). A file of faults for each group of them; all_faults() is their table.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "plan/lives.h"
#include "plan/plan.h"
#include "property.h"

namespace whale::test {

// Who has to notice: the plan verifier, before anything runs, or either of it and the comparison of numbers.
enum class Catcher : uint8_t { kVerifier, kEither };

struct Fault {
  const char* kind;
  Catcher by;
  // Damages the train entry at a random place; false: the plan has no such place (and may be half changed).
  std::function<bool(Plan&, Dice&)> plant;
  bool holes = false;      // of the plan as it is; others damage one whose devices have programs without holes
  const char* group = "";  // the file that it is in
};

std::vector<Fault> faults_of_collectives();
std::vector<Fault> faults_of_order();
std::vector<Fault> faults_of_memory();
std::vector<Fault> faults_of_links();
std::vector<Fault> faults_of_samples();
std::vector<Fault> faults_of_attributes();
std::vector<Fault> faults_of_values();
std::vector<Fault> faults_of_variables();
std::vector<Fault> faults_of_places();
std::vector<Fault> all_faults();

// ---- places -------------------------------------------------------------------------------------------------------
// An instruction of a program of the train entry.
struct Spot {
  Program* program = nullptr;
  Segment* segment = nullptr;
  size_t index = 0;
  Instruction& at() const { return segment->instructions[index]; }
  Buffer& buffer(BufferId id) const { return program->buffers[id]; }
  Attrs& attrs() const {  // empty: no kernel's
    static Attrs none;
    auto* kernel = at().as<work::Kernel>();
    return kernel != nullptr ? kernel->attrs : none;
  }
};

Entry& train_of(Plan& plan);

using Wanted = std::function<bool(const Spot&)>;
using Change = std::function<bool(const Spot&, Dice&)>;

// Of the instructions that run and are wanted, in random order: changes the first one that `change` takes. kEverywhere:
// also its likes (of one name in segments of one name) in every program, with the same dice; kAny: now so, now so.
enum class Reach : uint8_t { kOne, kEverywhere, kAny };
bool damage(Plan& plan, Dice& dice, Reach reach, const Wanted& wanted, const Change& change);

// An element of a list that is wanted, by chance; null: none is.
template <class T, class Test>
T* choose(std::vector<T>& list, Dice& dice, Test test) {
  std::vector<T*> fit;
  for (T& x : list)
    if (test(x)) fit.push_back(&x);
  return fit.empty() ? nullptr : fit[dice.below(std::ssize(fit))];
}

// ---- changes ------------------------------------------------------------------------------------------------------
// What waited for the instruction waits for what it waited for.
void erase_instruction(const Spot& spot);
// Before the spot; waits keep their meaning.
void insert_instruction(const Spot& spot, size_t at, Instruction instruction);
// A buffer of its own in the arena.
BufferId add_buffer(Program& program, Buffer like);
// Another name for the storage of `like`.
BufferId add_alias(Program& program, BufferId like);
// Reads of `from` become reads of `to`: behind (segment, index), or in the whole program.
void read_instead(Program& program, BufferId from, BufferId to, const Segment* segment = nullptr, size_t behind = 0);
bool same_type(const Buffer& a, const Buffer& b);
bool is_update(const Instruction& i);
std::string base_name(const std::string& segment);  // "body" of "body/3"

}  // namespace whale::test
