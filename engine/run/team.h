// The threads of a session's devices: one for each (device, queue) in use, parked between jobs.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "device/device.h"

namespace whale {

// An exception as an Error: what it is or holds, too little memory to do it, or a bug.
Error as_error(const std::exception& e, const std::string& purpose);

// What all threads of a team do together.
class Job {
 public:
  virtual ~Job() = default;
  virtual void run(int device, Queue queue) noexcept = 0;
  virtual void
  finished() noexcept = 0;  // once, on the thread that ends last; the team is free for the next job after it
};

class Team {
 public:
  // Starts the compute threads; throws what enter_thread throws. Null: a device of another rank, without threads.
  explicit Team(std::vector<Device*> devices);
  ~Team();  // waits for the job under way
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  void add_queue(int device, Queue queue);  // a thread for it, when there is none yet; only between jobs
  bool has_queue(int device, Queue queue) const;
  void start(Job& job);  // returns at once; one job at a time
  void wait_idle() const;
  // body(device) on every device's compute thread; throws the first Error, by device, after all have ended.
  // `purpose`: what it does, for an error: "make the kernels".
  void on_each(const std::string& purpose, const std::function<void(int)>& body);
  size_t threads() const { return workers_.size(); }
  // In a child process after fork() there are no threads: forgets them.
  void abandon();

 private:
  struct Worker {
    int device;
    Queue queue;
    std::thread thread;
  };
  void end();  // of all threads, after the job under way
  void loop(int device, Queue queue, uint32_t seen, std::atomic<int>& entered, std::exception_ptr& failure);

  std::vector<Device*> devices_;
  std::vector<std::unique_ptr<Worker>> workers_;
  Job* job_ = nullptr;
  std::atomic<uint32_t> round_{0};      // moves when a job starts
  std::atomic<uint32_t> busy_{0};       // a job is under way
  std::atomic<uint32_t> remaining_{0};  // threads still in it
  std::atomic<bool> quit_{false};
};

}  // namespace whale
