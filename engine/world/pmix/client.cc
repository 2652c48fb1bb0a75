// Of PMIx 4 and later: this process as a client of its launcher's server.
#include <pmix.h>

#include <optional>
#include <string>

#include "base/error.h"
#include "base/version.h"
#include "world/pmix_library.h"

namespace whale {
namespace {

pmix_proc_t self;

void check(pmix_status_t status, const char* what) {
  if (status != PMIX_SUCCESS)
    throw error(Code::kUnavailable,
                "{} failed: PMIx says {} ({}). Start the program by a launcher that speaks PMIx {}.x, or set RANK, "
                "WORLD_SIZE, MASTER_ADDR and MASTER_PORT on each rank",
                what, PMIx_Error_string(status), status, PMIX_VERSION_MAJOR);
}

pmix_proc_t everyone() {
  pmix_proc_t all;
  PMIX_LOAD_PROCID(&all, self.nspace, PMIX_RANK_WILDCARD);
  return all;
}

// Its text, or its number as one: servers differ in the types of numbers.
std::optional<std::string> text_of(const pmix_value_t& value) {
  switch (value.type) {
    case PMIX_STRING: return value.data.string == nullptr ? "" : value.data.string;
    case PMIX_UINT16: return std::to_string(value.data.uint16);
    case PMIX_UINT32: return std::to_string(value.data.uint32);
    case PMIX_UINT64: return std::to_string(value.data.uint64);
    case PMIX_INT: return std::to_string(value.data.integer);
    case PMIX_INT32: return std::to_string(value.data.int32);
    case PMIX_SIZE: return std::to_string(value.data.size);
    case PMIX_PROC_RANK: return std::to_string(value.data.rank);
    default: return std::nullopt;
  }
}

std::optional<std::string> find(const pmix_proc_t& of, const char* key) {
  pmix_value_t* value = nullptr;
  if (PMIx_Get(&of, key, nullptr, 0, &value) != PMIX_SUCCESS) return std::nullopt;
  std::optional<std::string> text = text_of(*value);
  PMIX_VALUE_RELEASE(value);
  return text;
}

PmixJob join() {
  check(PMIx_Init(&self, nullptr, 0), "PMIx_Init");
  PmixJob job;
  job.rank = static_cast<int>(self.rank);
  const std::optional<std::string> size = find(everyone(), PMIX_JOB_SIZE);
  if (!size) check(PMIX_ERR_NOT_FOUND, "the question for the size of the job (" PMIX_JOB_SIZE ")");
  job.size = std::stoi(*size);
  job.local_size = std::stoi(find(everyone(), PMIX_LOCAL_SIZE).value_or("0"));
  job.local_rank = std::stoi(find(self, PMIX_LOCAL_RANK).value_or("0"));
  job.host = find(self, PMIX_HOSTNAME).value_or("");
  return job;
}

std::string share(const PmixJob& job, const std::string& said) {
  constexpr const char* kKey = "whale.meeting";
  if (job.rank == 0) {
    pmix_value_t value;
    PMIX_VALUE_LOAD(&value, said.c_str(), PMIX_STRING);
    const pmix_status_t put = PMIx_Put(PMIX_GLOBAL, kKey, &value);
    PMIX_VALUE_DESTRUCT(&value);
    check(put, "PMIx_Put");
    check(PMIx_Commit(), "PMIx_Commit");
  }
  pmix_info_t collect;
  bool yes = true;
  PMIX_INFO_LOAD(&collect, PMIX_COLLECT_DATA, &yes, PMIX_BOOL);
  const pmix_proc_t all = everyone();
  const pmix_status_t met = PMIx_Fence(&all, 1, &collect, 1);
  PMIX_INFO_DESTRUCT(&collect);
  check(met, "PMIx_Fence");
  if (job.rank == 0) return said;
  pmix_proc_t first;
  PMIX_LOAD_PROCID(&first, self.nspace, 0);
  const std::optional<std::string> heard = find(first, kKey);
  if (!heard) check(PMIX_ERR_NOT_FOUND, "PMIx_Get of what rank 0 has said");
  return *heard;
}

void leave() { check(PMIx_Finalize(nullptr, 0), "PMIx_Finalize"); }

}  // namespace
}  // namespace whale

extern "C" __attribute__((visibility("default"))) const whale::PmixEntry whale_pmix;
extern "C" const whale::PmixEntry whale_pmix{whale::kVersion, whale::join, whale::share, whale::leave};
