// Clicks a button, answers no, then yes.
const report = (found) => {
  const result = document.createElement("pre");
  result.id = "found";
  result.hidden = true;
  result.textContent = JSON.stringify(found);
  parent.document.body.append(result);
};
const pause = () => new Promise((resolve) => setTimeout(resolve, 500));
const press = () => [...document.querySelectorAll("main button")].find((it) => it.textContent.startsWith("Move to host2")).click();
const answer = (value) => dialog.querySelector(`button[value=${value}]`).click();
(async () => {
  await pause();
  press();
  const found = { question: document.getElementById("question").textContent, asks: dialog.open };
  answer("no");
  await pause();
  found.closed = !dialog.open;
  found.afterCancel = [...requests];
  press();
  answer("yes");
  await pause();
  found.afterYes = [...requests];
  found.notice = notice.textContent;
  found.bold = document.querySelectorAll("b").length;
  report(found);
})();
